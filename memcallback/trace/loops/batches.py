"""Makes the batches of a trace on the device, and keeps those that the loop keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memcallback.core.errors import PredictionError, reason_of
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.tensors import tensors_in
from memcallback.core.types import Stage
from memcallback.step.copies.resizing import resize_batch
from memcallback.step.lightning_batch import AFTER_TRANSFER, TRANSFER, owner_of_hook
from memcallback.step.step import Step
from memcallback.trace.batch_sizes import BatchSizes
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.marks import TraceMarks
from memcallback.trace.request import TraceRequest


class BatchHookError(PredictionError):
    """A hook that brings batches to the device fails on fake tensors; the rest may run."""


def hook_error(failure: str, error: BaseException) -> BatchHookError:
    """Say what failed with the hooks, and why."""
    return BatchHookError(
        f"{failure}, so what it allocates for a batch is left out: {reason_of(error)}"
    )


class Batches:
    """The batches of the loops of a trace.

    Attributes:
        other: The sizes of the batches that come now, if others than the step's own.
    """

    def __init__(
        self,
        request: TraceRequest,
        examples: Mapping[Stage, Any],
        model: Any,
        datamodule: Any,
        *,
        marks: TraceMarks,
        mode: TraceMode,
        num_parts: int,
    ) -> None:
        # All are copies, none of which is the user's.
        self._examples, self._model, self._datamodule = examples, model, datamodule
        self._request, self._marks, self._mode = request, marks, mode
        #: Parts that a pipeline cuts a batch into, each with the samples of one batch.
        self._num_parts = num_parts
        #: Those that loops keep until the next ones are on the device.
        self._kept: dict[Stage, list[Any]] = {}
        #: The first ones, which some loaders keep, too.
        self._first: dict[Stage, Any] = {}
        self.other: BatchSizes | None = None

    def sizes(self, step: Step) -> BatchSizes:
        """The sizes that are asked for; a training that comes before a forward pass has its own."""
        request = self._request
        is_resized = step is request.step
        return BatchSizes(
            (request.batch_size if is_resized else None) or step.batch_size.batch_size or 0,
            (request.sequence_length if is_resized else None) or step.sequence_length,
        )

    def new(self, step: Step, number: int = 1) -> list[Any]:
        """The next batches of a step."""
        batches = [self._new_batch(step, self.other or self.sizes(step)) for _ in range(number)]
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
        own_size = self._num_parts * new.batch_size
        ranks = step.ranks if step.loads_all_ranks else None
        whole_size = own_size if ranks is None else own_size * ranks.world_size
        with self._mode.unrecorded():
            batch = resize_batch(self._examples[step.stage], size, whole_size, lengths=lengths)
        if ranks is not None:
            self._marks.add_batch(batch)
            return _samples_of(batch, whole_size, ranks.rank * own_size, own_size)
        if not self._request.runs_hooks_of(step):
            self._marks.add_batch(batch)
            return batch
        return self._moved(batch, step)

    def _moved(self, batch: Any, step: Step) -> Any:
        """The batch on the device, as the hooks of a LightningModule bring it there."""
        # As LightningModule._apply_batch_transfer_handler, which holds the batch that a hook gets.
        owner = owner_of_hook(self._model, self._datamodule, TRANSFER)
        if owner is None or self._mode.spec is None:
            self._marks.add_batch(batch)
        else:
            self._marks.add_batch(batch, on_host=_on_host(step.batch))
        if owner is not None:
            device = CUDA if self._mode.spec else torch.device("cpu")
            batch = self._call(step, owner, TRANSFER, batch, device)
        owner = owner_of_hook(self._model, self._datamodule, AFTER_TRANSFER)
        if owner is not None:
            batch = self._call(step, owner, AFTER_TRANSFER, batch)
        self._marks.label_batch(batch)
        return batch

    def _call(self, step: Step, owner: Any, name: str, *args: Any) -> Any:
        assert step.lightning is not None
        step.lightning.give_placeholder(owner, step.stage)
        has_gradients = step.stage is Stage.TRAINING
        try:
            with torch.set_grad_enabled(has_gradients):
                return getattr(owner, name)(*args, 0)
        except ENDS as error:  # user code on fakes can fail, and end, in any way
            raise_if_meant(error)
            raise hook_error(f"{type(owner).__name__}.{name} cannot be traced", error) from error


def _on_host(batch: Any) -> list[bool]:
    """Whether each tensor of a batch is on the host, as nearly all that come from a loader are."""
    return [tensor.device.type in ("cpu", "meta") for tensor in tensors_in(batch)]


def _samples_of(part: Any, whole_size: int, first: int, number: int) -> Any:
    """Views of some of the samples of a batch."""
    if isinstance(part, torch.Tensor):
        is_of_samples = part.dim() > 0 and len(part) == whole_size
        return part[first : first + number] if is_of_samples else part
    if isinstance(part, Mapping):
        return {name: _samples_of(one, whole_size, first, number) for name, one in part.items()}
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_samples_of(one, whole_size, first, number) for one in part))
    if type(part) in (list, tuple):
        return type(part)(_samples_of(one, whole_size, first, number) for one in part)
    return part
