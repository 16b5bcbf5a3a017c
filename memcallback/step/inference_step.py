"""InferenceStep: a forward pass alone: inference, validation, generation of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import IterableDataset

from memcallback.core.types import Stage
from memcallback.core.validation import (
    cannot_take,
    described,
    name_of,
    one_of,
    true_or_false,
    whole_number,
)
from memcallback.step.beside import AlsoOption, beside
from memcallback.step.huggingface_loop import Evaluation
from memcallback.step.lightning_loop import LightningLoop
from memcallback.step.loss import is_passed_by_name
from memcallback.step.step import DEFAULT_DTYPES, Step
from memcallback.step.training_step import TrainingStep

#: A function of the model and the batch that returns the outputs.
Forward = Callable[[Any, Any], Any]
#: Whether autograd records the forward pass.
GradMode = Literal["inference_mode", "no_grad", "grad"]
#: Which outputs the loop keeps while the next batch runs.
Kept = Literal["none", "last", "all"]
_STAGES = {"validate": Stage.VALIDATION, "test": Stage.TEST, "predict": Stage.PREDICTION}


class InferenceStep(Step):
    """One forward pass: for inference, a validation loop, or the generation of tokens.

    Args:
        model: The model, on any device; it is never changed. It runs as it is, in training or in
            evaluation mode: call `model.eval()` as your program does.
        batch: As for `TrainingStep`.
        forward: A function of the model and the batch that returns the outputs. The default calls
            `model(batch)`; a mapping whose keys are arguments of the model's `forward` is passed as
            `model(**batch)`.
        generate: Arguments of a transformers model's `generate`, with `max_new_tokens`; the batch
            has the others, such as `input_ids`. Each sequence is assumed to get `max_new_tokens`.
        precision: As for `TrainingStep`; a mixed one is autocast around the forward pass.
        batch_size: As for `TrainingStep`.
        sequence_length: As for `TrainingStep`; for `generate` the length of the prompt.
        mode: `inference_mode`, `no_grad`, or `grad` if autograd records the forward pass.
        keep_outputs: Which outputs the loop keeps while the next batch runs: those of the `last`
            batch, as `outputs = model(batch)` in a loop does; those of `all` batches, as a list on
            the device does; or `none`.
        keep_batch: As for `TrainingStep`.
        num_batches: How many batches there are, if outputs or state grow from batch to batch; the
            last batch is predicted. By default the second batch is predicted, and a caveat says how
            much each further one adds.
        after: The training that comes before on the same device, as a step of the same model: its
            parameters, gradients, optimizer state and cached memory are still there. With `after`,
            the forward pass runs in evaluation mode.
        frees_gradients: Whether the training's gradients are freed before the forward pass.
        also: As for `TrainingStep`.

    Attributes:
        stage: The kind of run that it is a step of, such as a validation.

    Raises:
        ValueError: For an unknown precision, mode or choice of outputs, a number out of range, a
            sequence length that no tensor has, or a training of another model.
        TypeError: For an argument of the wrong type, or a function that cannot be called with its
            arguments.
    """

    name = "InferenceStep"

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        *,
        forward: Forward | None = None,
        generate: Mapping[str, Any] | None = None,
        precision: str | int = "32-true",
        batch_size: int | None = None,
        sequence_length: int | None = None,
        mode: GradMode = "inference_mode",
        keep_outputs: Kept = "last",
        keep_batch: bool = False,
        num_batches: int | None = None,
        after: TrainingStep | None = None,
        frees_gradients: bool = False,
        also: AlsoOption = None,
    ) -> None:
        super().__init__(
            model,
            batch,
            precision=precision,
            batch_size=batch_size,
            sequence_length=sequence_length,
            ranks=None,
            also=also,
            keep_batch=keep_batch,
        )
        self.ranks = None  # of a DistributedDataParallel, whose ranks exchange gradients alone
        self.stage = Stage.INFERENCE
        self.generate = None if generate is None else _checked_generation(model, forward, generate)
        if self.generate is not None:
            self.stage = Stage.GENERATION
        self.forward = _run if forward is None else _checked_forward(forward)
        self.mode = one_of("mode", mode, GradMode)
        self.keep_outputs = one_of("keep_outputs", keep_outputs, Kept)
        self.num_batches = (
            None
            if num_batches is None
            else whole_number("num_batches", num_batches, "Give how many batches there are.")
        )
        self.after = None if after is None else _checked_training(after, self.model)
        self.frees_gradients = true_or_false("frees_gradients", frees_gradients)

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """The forward pass."""
        return (self.forward,)

    def beside(self) -> dict[str, Any]:
        """What is on the device beside the model, by name, in the training `after` too."""
        if self.after is None:
            return super().beside()
        functions = (*self.functions_to_copy(), *self.after.functions_to_copy())
        return beside(self.model, functions, self.held())

    def held(self) -> dict[str, Any]:
        """`also`, and what the training `after` holds, by name.

        Returns:
            Modules, and containers of tensors.
        """
        return {**(self.after.held() if self.after is not None else {}), **self.also}

    def window_within(self) -> int | None:
        """The length of a sliding window that is filled while tokens are generated.

        Returns:
            Its tokens; None if the prompt fills it, or if it never fills.
        """
        config = getattr(self.model, "config", None)
        window = getattr(config, "sliding_window", None)
        tokens = self.batch.get("input_ids") if isinstance(self.batch, Mapping) else self.batch
        if self.generate is None or window is None or not isinstance(tokens, torch.Tensor):
            return None
        length = tokens.shape[-1]
        is_within = length < window < length + self.generate["max_new_tokens"]
        return int(window) if is_within else None

    @classmethod
    def from_lightning(
        cls,
        module: Any,
        batch: object,
        *,
        stage: Literal["validate", "test", "predict"] = "validate",
        precision: str | int = "32-true",
        batch_size: int | None = None,
        sequence_length: int | None = None,
        mode: GradMode = "inference_mode",
        num_batches: int | None = None,
        after: TrainingStep | None = None,
        also: AlsoOption = None,
        datamodule: Any = None,
    ) -> InferenceStep:
        """The step that a LightningModule's `validation_step` describes, or another stage's.

        The module is set to evaluation mode, as the Trainer does. What the module itself keeps from
        batch to batch (a list of outputs, the state of metrics) counts; the Trainer keeps no
        outputs.
        Inside a training, Lightning frees the gradients before validation; so does the prediction.

        Args:
            module: A LightningModule of `lightning` or `pytorch_lightning`.
            batch: As for `TrainingStep.from_lightning`.
            stage: `validate`, `test` or `predict`: which of the module's steps runs.
            precision: As for `TrainingStep`.
            batch_size: As for `TrainingStep`.
            sequence_length: As for `TrainingStep`.
            mode: `inference_mode`, or `no_grad` for a Trainer with `inference_mode=False`.
            num_batches: As for `InferenceStep`.
            after: The training that comes before, from `TrainingStep.from_lightning`.
            also: As for `TrainingStep`.
            datamodule: As for `TrainingStep.from_lightning`.

        Raises:
            TypeError: As for `InferenceStep`, and if the module has no such step.
            ValueError: As for `InferenceStep`.
        """
        if stage not in _STAGES:
            raise ValueError(f"stage {stage!r} is not known. Use one of {', '.join(_STAGES)}.")
        prefix = {"validate": "validation"}.get(stage, stage)
        name = f"{prefix}_step"
        if not callable(getattr(module, name, None)):
            raise TypeError(
                f"module must be a LightningModule with a {name}, got {described(module)}. For "
                "another loop give InferenceStep(model, batch, forward=...)."
            )
        loop = LightningLoop(None, datamodule)
        step = cls(
            module,
            batch,
            forward=lambda copy, fakes: loop.evaluation_step(copy, fakes, prefix),
            precision=precision,
            batch_size=batch_size,
            sequence_length=sequence_length,
            mode=mode,
            keep_outputs="none",
            num_batches=num_batches,
            after=after,
            frees_gradients=True,
            also=also,
        )
        loop.default_dtype = DEFAULT_DTYPES.get(step.precision)
        step.lightning, step.stage = loop, _STAGES[stage]
        return step

    @classmethod
    def from_huggingface(
        cls,
        trainer: Any,
        inputs: Mapping[str, Any],
        *,
        num_batches: int | None = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        after: TrainingStep | None = None,
        also: AlsoOption = None,
    ) -> InferenceStep:
        """`Trainer.evaluate` of transformers, with the Trainer's arguments.

        The Trainer concatenates the losses of all batches on the device. If it has
        `compute_metrics`, it does the same with the labels and with the logits, which
        `preprocess_logits_for_metrics` may change first. With `eval_accumulation_steps` it moves
        all these to the host after that many batches; with `batch_eval_metrics` it keeps only the
        losses.
        The Trainer pads logits of different lengths; the prediction assumes that all batches
        have one length. The gradients of a training are freed before the evaluation.

        Args:
            trainer: A `transformers.Trainer`; its model, arguments and both functions are read.
            inputs: One batch of its evaluation, by name.
            num_batches: Batches of the evaluation, counted over all ranks, because each rank keeps
                the results of all. With `eval_accumulation_steps` a rank keeps the results of at
                most that many batches from each rank.
            batch_size: As for `TrainingStep`.
            sequence_length: As for `TrainingStep`.
            after: The training that comes before.
            also: As for `TrainingStep`.

        Raises:
            TypeError: As for `InferenceStep`, and if `trainer` has no model and arguments.
            ValueError: As for `InferenceStep`.
        """
        model, args = getattr(trainer, "model", None), getattr(trainer, "args", None)
        if not isinstance(model, nn.Module) or args is None:
            raise TypeError(
                f"trainer must be a transformers.Trainer, got {described(trainer)}. For another "
                "loop give InferenceStep(model, batch, forward=...)."
            )
        together = args.eval_accumulation_steps
        if num_batches is not None and together is not None:
            num_batches = min(num_batches, together * getattr(args, "world_size", 1))
        step = cls(
            model,
            dict(inputs),
            forward=Evaluation(
                keeps_loss_alone=args.prediction_loss_only
                or getattr(trainer, "compute_metrics", None) is None,
                concatenates_loss_alone=getattr(args, "batch_eval_metrics", False),
                preprocess=getattr(trainer, "preprocess_logits_for_metrics", None),
            ),
            precision="16-mixed" if args.fp16 else "bf16-mixed" if args.bf16 else "32-true",
            batch_size=batch_size,
            sequence_length=sequence_length,
            mode="no_grad",
            keep_outputs="none",
            keep_batch=True,
            num_batches=num_batches,
            after=after,
            frees_gradients=True,
            also=also,
        )
        step.stage = Stage.VALIDATION
        step.keeps_first_batch = _dispatches_evaluation(trainer)
        return step


def _dispatches_evaluation(trainer: Any) -> bool:
    """Whether accelerate dispatches a Trainer's batches of evaluation; then it keeps the first."""
    is_wanted = getattr(getattr(trainer, "accelerator", None), "dispatch_batches", None)
    data = getattr(trainer, "eval_dataset", None)
    several = data.values() if isinstance(data, dict) else [data]
    is_stream = any(isinstance(one, IterableDataset) for one in several)
    # Of a stream the Trainer keeps the last batch, which may have to be filled up.
    keeps_last = is_stream or not getattr(trainer.args, "dataloader_drop_last", False)
    return keeps_last and (is_stream if is_wanted is None else bool(is_wanted))


def _run(model: Any, batch: Any) -> Any:
    """Call a model with a batch."""
    return model(**batch) if is_passed_by_name(model, batch) else model(batch)


def _checked_forward(forward: object) -> Forward:
    if not callable(forward):
        raise TypeError(
            f"forward must be a function of the model and the batch, got {described(forward)}. "
            "Give forward=lambda model, batch: ..., or leave it out for model(batch)."
        )
    if failure := cannot_take(forward, 2):
        raise TypeError(
            f"forward {name_of(forward)} cannot be called with the model and the batch: {failure}. "
            "Give forward=lambda model, batch: ..."
        )
    return forward


def _checked_training(after: object, model: nn.Module) -> TrainingStep:
    if not isinstance(after, TrainingStep):
        raise TypeError(
            f"after must be a TrainingStep, got {described(after)}. Give the training that comes "
            "before: after=TrainingStep(model, batch, loss=..., optimizer=...)."
        )
    if after.model is not model:
        raise ValueError(
            f"The training in after=... trains {described(after.model)}, but this step runs "
            f"another model, {described(model)}. Give a training of the same model object."
        )
    if after.ranks is not None:
        raise ValueError(
            f"The training in after=... has {after.ranks.world_size} ranks, but a forward pass is "
            "predicted on one device only. Give the training without ranks."
        )
    return after


def _checked_generation(
    model: nn.Module, forward: object, generate: Mapping[str, Any]
) -> dict[str, Any]:
    """Check that a model generates, and that the number of tokens is given."""
    hint = "Give generate={'max_new_tokens': 128}, and the prompt in the batch."
    if not isinstance(generate, Mapping):
        raise TypeError(f"generate must be a mapping, got {described(generate)}. {hint}")
    if forward is not None:
        raise ValueError(
            f"forward {name_of(forward)} and generate are two ways to run the model. Give one."
        )
    if not callable(getattr(model, "generate", None)):
        raise TypeError(
            f"model is {described(model)}, which has no generate(). Give a model of transformers "
            "that generates, or forward=lambda model, batch: ... with a loop of your own."
        )
    whole_number("max_new_tokens", generate.get("max_new_tokens"), hint)
    return dict(generate)
