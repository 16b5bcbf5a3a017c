"""predict_here(): traces a step at several batch sizes, in this process, and replays it."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.torch_private import FakeTensorMode, enable_record_function
from memcallback.core.validation import MAX_BATCH_SIZE, MIN_SEQUENCE_LENGTH, whole_number
from memcallback.devices.catalogue import NCCL_BYTES, Device, DeviceSpec, HostSpec
from memcallback.isolation.child import is_in_child
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import (
    ONLY,
    BatchDependentPath,
    BatchTrace,
    is_same_path,
)
from memcallback.prediction.length_trace import (
    LengthDependentPath,
    SequenceLengthTrace,
    lengths_to_trace,
)
from memcallback.prediction.prediction import Prediction
from memcallback.step.copies.resizing import has_samples
from memcallback.step.step import Step
from memcallback.trace.traced_step import TracedStep

#: One for the step, two to know every batch size.
_NUM_TRACES = 3
#: With other sequence lengths: two batch sizes at two more, and one at a fourth.
_NUM_TRACES_WITH_LENGTHS = _NUM_TRACES + 5


def predict_here(
    step: Step,
    *,
    device: Device,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    settings: AllocatorSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
    with_limits: bool = False,
) -> Prediction:
    """Predict as `predict` does, in this process; its two limits take about 20 replays more."""
    spec = with_communication(device, step.ranks.world_size if step.ranks else 1)
    own_batch_size = step.check_predictable()
    wanted = (
        own_batch_size
        if batch_size is None
        else whole_number(
            "batch_size",
            batch_size,
            f"Leave it out for the batch's own, {own_batch_size}.",
            most=MAX_BATCH_SIZE,
        )
    )
    if wanted != own_batch_size and not has_samples(step.batch, own_batch_size):
        raise PredictionError(
            f"Batch size {wanted} cannot be predicted: no tensor of the batch has the step's own "
            f"batch size, {own_batch_size}, as its first dimension, so no batch of another size "
            f"can be made of it. Give the step a batch of {wanted} samples."
        )
    length = step.sequence_length
    if sequence_length is not None:
        own = "Leave it out." if length is None else f"Leave it out for the step's own, {length}."
        length = whole_number(
            "sequence_length", sequence_length, own, least=MIN_SEQUENCE_LENGTH, most=MAX_BATCH_SIZE
        )
    trace: BatchTrace | SequenceLengthTrace
    if length is None:
        trace = _batch_trace(Traces(step, spec, _NUM_TRACES, progress), wanted)
    elif step.sequence_length is None:
        raise ValueError(
            f"sequence_length {length} was asked for, and the step does not say how long its "
            "sequences are. Give it to the step: sequence_length=..."
        )
    else:
        trace = _length_trace(
            Traces(step, spec, _NUM_TRACES_WITH_LENGTHS, progress), wanted, length
        )
    return Prediction.of(trace, spec, batch_size=wanted, settings=settings, with_limits=with_limits)


def with_communication(device: Device, num_ranks: int) -> Device:
    """The device with the memory of NCCL if there are several ranks: the most that was seen."""
    if isinstance(device, HostSpec) or num_ranks == 1:
        return device
    return replace(device, communication_bytes=NCCL_BYTES[1])


def predict_once(
    step: Step, *, device: Device, batch_size: int, settings: AllocatorSettings | None = None
) -> Prediction:
    """Predict a step at one batch size alone: one trace."""
    traced = Traces(step, device, 1, None).at(batch_size, step.sequence_length)
    return Prediction.of(
        BatchTrace.single(traced),
        device,
        batch_size=batch_size,
        settings=settings,
        with_limits=False,
    )


class Traces:
    """Traces a step at several batch sizes and sequence lengths, and reports progress.

    Attributes:
        num_traces: How many there will be, as far as known.
        num_done: How many there are.
    """

    def __init__(
        self,
        step: Step,
        spec: Device,
        num_traces: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._step = step
        self._card = spec if isinstance(spec, DeviceSpec) else None
        self.num_traces = num_traces
        self.num_done = 0
        self._progress = progress
        self._tracer = load_tracer()
        self._bounds = self._tracer.Bounds()

    @property
    def has_samples(self) -> bool:
        """Whether the batch can be resized to another number of samples."""
        batch_size = self._step.batch_size.batch_size
        return batch_size is not None and has_samples(self._step.batch, batch_size)

    def at(self, batch_size: int, sequence_length: int | None) -> TracedStep:
        """The trace at a batch size and sequence length."""
        if self._progress is not None and not self.num_done:
            self._progress(0, self.num_traces)
        with quietly():
            traced: TracedStep = self._tracer.trace(
                self._tracer.TraceRequest(
                    step=self._step,
                    device=self._card,
                    batch_size=batch_size,
                    sequence_length=sequence_length,
                    bounds=self._bounds,
                    compiles=is_in_child(),
                    # In another process nothing runs beside the trace.
                    restores_program=is_in_child(),
                )
            )
        self.num_done += 1
        if traced.has_compiled_passes and self.num_done == 1:
            self.num_traces = 1
        if self._progress is not None and self.num_done < self.num_traces:
            self._progress(self.num_done, self.num_traces)
        return traced


def load_tracer() -> Any:
    """The tracer's module, imported when a step is traced.

    It needs private parts of PyTorch: one that is missing fails a prediction, not the import of a
    callback.
    """
    try:
        from memcallback.trace import tracer

        FakeTensorMode()  # imports what it needs when the first one is made
    except (ImportError, AttributeError) as error:
        raise PredictionError(
            f"PyTorch {torch.__version__} lacks a part that tracing needs: {error}. Use a release "
            "of PyTorch that memcallback was tested with (docs/versions.md)"
        ) from error
    return tracer


def _batch_trace(traces: Traces, batch_size: int, sequence_length: int | None = None) -> BatchTrace:
    """The step's trace at any batch size; at one alone, if it takes another path at others."""
    first = traces.at(batch_size, sequence_length)
    if not traces.has_samples:
        caveat = (
            f"{ONLY} {batch_size} is predicted: no tensor of the batch has {batch_size} as its "
            "first dimension, so the batch cannot be made larger."
        )
        return BatchTrace.single(replace(first, caveats=(*first.caveats, caveat)))
    if first.has_compiled_passes:
        return _alone(first, "torch.compile writes other code for another batch size")
    at = functools.cache(
        lambda size: first if size == batch_size else traces.at(size, sequence_length)
    )
    try:
        return _line(at, batch_size, traces)
    except PredictionError as error:
        reason = str(error)
    except BatchDependentPath as error:
        reason = str(error)
        if batch_size == 1:
            # Kernels for one sample are often others. The line goes through larger batches.
            traces.num_traces += 2
            with suppress(BatchDependentPath, PredictionError):
                return replace(_line(at, 2, traces), exceptions={1: BatchTrace.single(first)})
    return _alone(first, reason)


def _alone(traced: TracedStep, reason: str) -> BatchTrace:
    """A trace that knows its own batch size alone, and says why."""
    caveat = (
        f"{ONLY} {traced.batch_size} is predicted. Any other batch size needs its own trace: "
        f"memcallback.predict(step, batch_size=...). The reason: {reason.rstrip('.')}."
    )
    return BatchTrace.single(replace(traced, caveats=(*traced.caveats, caveat)))


def _line(at: Callable[[int], TracedStep], batch_size: int, traces: Traces) -> BatchTrace:
    """The trace at any batch size, from traces at three; at four if a size is no straight line."""
    first, second = at(batch_size), at(batch_size + 1)
    try:
        return BatchTrace.fit(first, second).verified(at(_far(batch_size)))
    except BatchDependentPath:
        if not is_same_path(first, second):
            raise
        far = at(_far(batch_size))
        if not is_same_path(first, far):
            raise
        traces.num_traces += 1
        return BatchTrace.fit_curve(first, second, at(batch_size + 2), far)


def _far(batch_size: int) -> int:
    """A batch size far enough to expose sizes that only look linear nearby."""
    return 2 * batch_size + 3


def _length_trace(traces: Traces, batch_size: int, sequence_length: int) -> SequenceLengthTrace:
    """The step's trace at any sequence length; at one alone, if it takes another path at others."""
    own = _batch_trace(traces, batch_size, sequence_length)
    batch_size, is_any = own.batch_size, own.is_any_batch_size_known
    traces.num_traces += 3 * len(own.exceptions)
    if own.curvatures is not None:
        traces.num_traces += 2

    def traced(length: int) -> BatchTrace:
        first = traces.at(batch_size, length)
        if not is_any:
            return BatchTrace.single(first)
        second = traces.at(batch_size + 1, length)
        return replace(
            BatchTrace.fit(first, second)
            if own.curvatures is None
            else BatchTrace.fit_curve(first, second, traces.at(batch_size + 2, length)),
            exceptions={
                size: BatchTrace.single(traces.at(size, length)) for size in own.exceptions
            },
        )

    if own.traced.has_compiled_passes:
        reason = "torch.compile writes other code for another length"
    else:
        _, second, third, last = lengths_to_trace(sequence_length)
        try:
            known = {sequence_length: own, second: traced(second), third: traced(third)}
            sizes = (_far(batch_size) if is_any else batch_size, *own.exceptions)
            return SequenceLengthTrace.fit(known, (last, [traces.at(size, last) for size in sizes]))
        except (BatchDependentPath, LengthDependentPath, PredictionError) as error:
            reason = str(error).rstrip(".")
    caveat = (
        f"Only sequence length {sequence_length} is predicted. Any other length needs its own "
        f"traces. The reason: {reason}."
    )
    told = {
        size: replace(trace, caveats=(*trace.caveats, caveat))
        for size, trace in own.exceptions.items()
    }
    return SequenceLengthTrace.single(
        replace(own, caveats=(*own.caveats, caveat), exceptions=told), sequence_length
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Silence user code on fake tensors: warnings, log messages, events in a user's profile.

    A LightningModule warns at each `self.log` without a Trainer; PyTorch logs a failed operator.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    enable_record_function(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        enable_record_function(True)
        logger.disabled = was_disabled
