"""Makes the batches of a trace on the device, and keeps those that the loop keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memcallback.core.errors import PredictionError, reason_of
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.types import Stage
from memcallback.step.copies.resizing import resize_batch
from memcallback.step.lightning_batch import AFTER_TRANSFER, TRANSFER, owner_of_hook
from memcallback.step.lightning_loop import give_placeholder
from memcallback.step.step import Step
from memcallback.trace.batch_sizes import BatchSizes
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.marks import TraceMarks


class BatchHookError(PredictionError):
    """A hook that brings batches to the device fails on fake tensors; the rest may run."""


class Batches:
    """The batches of the loops of a trace.

    Attributes:
        other: The sizes of the batches that come now, if others than the step's own.
    """

    def __init__(
        self,
        examples: Mapping[Stage, Any],
        model: Any,
        datamodule: Any,
        *,
        marks: TraceMarks,
        mode: TraceMode,
        num_parts: int,
        runs_hooks: bool,
    ) -> None:
        # All are copies, none of which is the user's.
        self._examples, self._model, self._datamodule = examples, model, datamodule
        self._marks, self._mode, self._runs_hooks = marks, mode, runs_hooks
        #: Parts that a pipeline cuts a batch into, each with the samples of one batch.
        self._num_parts = num_parts
        #: Those that loops keep until the next ones are on the device.
        self._kept: dict[Stage, list[Any]] = {}
        #: The first ones, which some loaders keep, too.
        self._first: dict[Stage, Any] = {}
        self.other: BatchSizes | None = None

    def new(self, step: Step, sizes: BatchSizes, number: int = 1) -> list[Any]:
        """The next batches of a step."""
        batches = [self._new_batch(step, self.other or sizes) for _ in range(number)]
        if step.keeps_first_batch:
            self._first.setdefault(step.stage, batches[0])
            # With the third batch, the second one goes.
            self._mode.num_windows_to_settle = max(2, self._mode.num_windows_to_settle)
        if step.keep_batch:
            self._kept[step.stage] = list(batches)
        return batches

    def close(self) -> None:
        """Let go of all."""
        self._kept.clear()
        self._first.clear()

    def _new_batch(self, step: Step, new: BatchSizes) -> Any:
        size, length = step.batch_size.batch_size or 0, step.sequence_length
        lengths = (length, new.length) if length and new.length else None
        with self._mode.unrecorded():
            batch = resize_batch(
                self._examples[step.stage], size, self._num_parts * new.batch_size, lengths=lengths
            )
        if step.lightning is None or not step.runs_batch_hooks or not self._runs_hooks:
            self._marks.add_batch(batch)
            return batch
        return self._moved(batch, step.stage)

    def _moved(self, batch: Any, stage: Stage) -> Any:
        """The batch on the device, as the hooks of a LightningModule bring it there."""
        # As LightningModule._apply_batch_transfer_handler, which holds the batch that a hook gets.
        device = CUDA if self._mode.spec else torch.device("cpu")
        owner = owner_of_hook(self._model, self._datamodule, TRANSFER)
        self._marks.add_batch(batch, is_host=owner is not None and self._mode.spec is not None)
        if owner is not None:
            batch = self._call(owner, TRANSFER, stage, batch, device)
        owner = owner_of_hook(self._model, self._datamodule, AFTER_TRANSFER)
        if owner is not None:
            batch = self._call(owner, AFTER_TRANSFER, stage, batch)
        self._marks.label_batch(batch)
        return batch

    def _call(self, owner: Any, name: str, stage: Stage, *args: Any) -> Any:
        give_placeholder(owner, stage)
        has_gradients = stage is Stage.TRAINING
        try:
            with torch.set_grad_enabled(has_gradients):
                return getattr(owner, name)(*args, 0)
        except ENDS as error:  # user code on fakes can fail, and end, in any way
            raise_if_meant(error)
            raise BatchHookError(
                f"{type(owner).__name__}.{name} cannot be traced, so the batch is assumed to come "
                f"to the device as it is loaded: {reason_of(error)}"
            ) from error
