"""The step and the evaluation that a Trainer of transformers is about to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.devices.catalogue import Device
from memcallback.prediction.predict_here import predict_once
from memcallback.prediction.prediction import Prediction
from memcallback.step.batch import infer_batch_size, last_batch_size
from memcallback.step.loss import Loss
from memcallback.step.model import is_sharded
from memcallback.step.ranks import replicated
from memcallback.step.training_step import TrainingStep

_MORE_SAMPLES = (
    "The Trainer's batch of {} becomes {} samples in the model, as with pairs. Batch sizes in the "
    "report count the model's samples: divide by {} for per_device_train_batch_size."
)


class PlannedEvaluation(NamedTuple):
    """An evaluation that a Trainer runs between training steps.

    Attributes:
        trainer: The Trainer.
        batch_size: Samples in a batch.
        num_batches: How many batches of all ranks its results grow over; None if they do not, or
            if nobody knows.
    """

    trainer: Any
    batch_size: int
    num_batches: int | None

    @classmethod
    def of(cls, trainer: Any) -> PlannedEvaluation | None:
        """What a Trainer evaluates while it trains; None for nothing."""
        args = trainer.args
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
            return None
        datasets = getattr(trainer, "eval_dataset", None)
        several: list[Any] = list(datasets.values()) if isinstance(datasets, dict) else [datasets]
        num_batches = None
        if getattr(trainer, "compute_metrics", None) is not None:
            # Each rank keeps the results of all.
            sizes = [size for one in several if (size := _length(one)) is not None]
            num_batches = max((-(-size // args.eval_batch_size) for size in sizes), default=None)
        return cls(trainer, args.eval_batch_size, num_batches)

    def predict(
        self, make_step: Callable[[], TrainingStep], inputs: Mapping[str, Any], device: Device
    ) -> Prediction | None:
        """Predict it after the training step, from inputs of that; None if it cannot be."""
        # Imported in the child: a training's first step does not wait for it.
        from memcallback.step.inference_step import InferenceStep

        try:
            step = InferenceStep.from_huggingface(
                self.trainer, inputs, num_batches=self.num_batches, after=make_step()
            )
            return predict_once(step, device=device, batch_size=self.batch_size)
        except ENDS as error:  # a model can fail in any way on fake tensors
            raise_if_meant(error)
            return None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception as error:  # a stream, or the user's code
        raise_if_meant(error)
        return None


def step_of(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    args: Any,
    *,
    loss: Loss | None = None,
    batch_size: int | None = None,
    loader: Any = None,
    goes_on_after_an_epoch: bool = True,
) -> TrainingStep:
    """The step that a Trainer is about to run, with the Trainer's arguments."""
    if is_sharded(model):
        return TrainingStep(model, inputs, batch_size=batch_size)
    from transformers import Trainer  # its user has imported it, but others need not

    # A model that accelerate has prepared enters autocast itself; so does the copy that is traced.
    size = infer_batch_size(inputs).batch_size if batch_size is None else batch_size
    step = TrainingStep(
        model,
        dict(inputs),
        loss=loss or loss_of_model,
        optimizer=optimizer,
        precision="16-mixed" if args.fp16 else "bf16-mixed" if args.bf16 else "32-true",
        batch_size=batch_size,
        accumulate=args.gradient_accumulation_steps,
        clip_grad_norm=args.max_grad_norm
        if args.max_grad_norm and args.max_grad_norm > 0
        else None,
        # The smaller batch that ends the last epoch changes no later one.
        other_batch_size=last_batch_size(loader, size) if goes_on_after_an_epoch else None,
        keep_batch=True,
    )
    # Since 4.46 the Trainer has this function, and keeps its list until the next one is full.
    step.loads_update_at_once = hasattr(Trainer, "get_batch_samples")
    if _dispatches(loader):
        # It may have to fill up its last batch with samples of the first one.
        step.keeps_first_batch = not getattr(loader, "_drop_last", True)
        step.loads_all_ranks = True
    return step


def _dispatches(loader: Any) -> bool:
    """Whether a loader of accelerate dispatches batches, as it does for a stream.

    Each rank gets the batches of all, and takes its own out of them.
    """
    return any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__)


def loss_of_model(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a model returns, as `Trainer.compute_loss` reads it."""
    outputs = model(**inputs)
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise ValueError(
            f"the model returns no loss for {', '.join(inputs)}, and we do not know how the "
            "Trainer computes it. Give it: MemoryTrainerCallback(loss=lambda model, inputs: ...)"
        )
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


def more_samples(inputs: Mapping[str, Any], batch_size: int) -> list[str]:
    """A note where a batch of the Trainer has several samples for each of its own."""
    size = infer_batch_size(inputs).batch_size or 0
    times, rest = divmod(size, batch_size)
    return [_MORE_SAMPLES.format(batch_size, size, times)] if times > 1 and not rest else []


def is_known_wrapper(wrapped: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Whether a model that `torch.compile` or DistributedDataParallel wraps can be predicted."""
    return replicated(wrapped) is not None or getattr(wrapped, "_orig_mod", None) is model
