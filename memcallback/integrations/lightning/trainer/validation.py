"""Predicts the validation of a fit, after its training step: which of the two needs more?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.tensors import storage_bytes, tensors_in
from memcallback.devices.catalogue import Device
from memcallback.integrations.lightning.trainer.loaded_batch import rebuilt
from memcallback.prediction.predict_here import predict_once
from memcallback.prediction.prediction import Prediction
from memcallback.step.training_step import TrainingStep

_PLAIN = (str, bytes, int, float, bool, type(None))


class _Opaque(Exception):
    """A batch holds something that may hold memory of the device."""


class ValidationBatches:
    """The largest batch that the sanity check of a fit has run, without its data.

    Keeping the batch itself would keep its memory.

    Attributes:
        batch: The batch; None if none was seen.
        loaded: The same before the module's hooks brought it to the device, as far as they are
            known to.
    """

    def __init__(self) -> None:
        self._num_bytes = -1
        self.batch: Any = None
        self.loaded: Any = None

    def see(self, batch: Any, loaded: Any) -> None:
        """Keep the shapes of a batch if it is the largest so far; none of an unknown kind."""
        try:
            num_bytes, shapes = _without_data(batch)
        except _Opaque:
            return
        if num_bytes > self._num_bytes:
            self._num_bytes, self.batch, self.loaded = num_bytes, shapes, shapes_of(loaded)


def shapes_of(loaded: Any) -> Any:
    """A batch that is still on the host, without its data; None for another."""
    if loaded is None or any(tensor.device.type != "cpu" for tensor in tensors_in(loaded)):
        return None
    try:
        return _without_data(loaded)[1]
    except _Opaque:
        return None


def _without_data(batch: Any) -> tuple[int, Any]:
    """The bytes of a batch, and the batch with tensors of the meta device."""
    tensors: list[torch.Tensor] = []

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, _PLAIN):
            return leaf
        if type(leaf) is not torch.Tensor or leaf.is_nested or leaf.is_quantized:
            raise _Opaque
        tensors.append(leaf)
        try:
            return torch.empty_like(leaf, device="meta")
        except (RuntimeError, NotImplementedError) as error:  # of another layout
            raise _Opaque from error

    shapes = rebuilt(batch, shape)
    return sum(storage_bytes([tensor]) for tensor in tensors), shapes


def predict_validation(
    trainer: Any, make_step: Callable[[], TrainingStep], seen: ValidationBatches, device: Device
) -> Prediction | None:
    """Predict a validation after the training step; None if it cannot be predicted.

    It is as long as the Trainer's where it keeps memory from batch to batch.
    """
    # Imported in the child: a training's first step does not wait for it.
    from memcallback.step.inference_step import InferenceStep

    loop = trainer.fit_loop.epoch_loop.val_loop

    def predicted(num_batches: int | None) -> Prediction | None:
        try:
            training = make_step()
            assert training.lightning is not None
            loaded = seen.loaded if training.runs_batch_hooks else None
            step = InferenceStep.from_lightning(
                training.model,
                seen.batch if loaded is None else loaded,
                precision=training.precision,
                mode="inference_mode" if getattr(loop, "inference_mode", True) else "no_grad",
                num_batches=num_batches,
                after=training,
                datamodule=training.lightning.datamodule,
            )
            assert step.lightning is not None
            step.lightning.facts = training.lightning.facts
            step.runs_batch_hooks = loaded is not None
            step.moved_batch = None if loaded is None else seen.batch
            return predict_once(step, device=device, batch_size=step.check_predictable())
        except ENDS as error:  # a user's validation_step can fail in any way on fake tensors
            raise_if_meant(error)
            return None

    few, num_batches = predicted(None), _num_batches(trainer)
    if few is None or num_batches is None or not _grows(few):
        return few
    # In the first batch a cache may have filled.
    several = predicted(min(3, num_batches))
    if several is None or num_batches <= 3 or not _grows(several):
        return several or few
    return predicted(num_batches) or several


def _grows(prediction: Prediction) -> bool:
    """Whether the last batch begins with more memory than the one before."""
    before, last = (step.windows[0].start.allocated_bytes for step in prediction.steps[-2:])
    return before is not None and last is not None and last > before


def _num_batches(trainer: Any) -> int | None:
    """The batches of a validation with one loader that has a length; else None."""
    numbers = trainer.num_val_batches
    number = numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers
    is_known = isinstance(number, (int, float)) and 0 < number < float("inf")
    return int(number) if is_known else None
