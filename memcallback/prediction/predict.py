"""predict(): traces a step at several batch sizes and replays it on a device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.torch_private import enable_record_function
from memcallback.core.validation import MIN_SEQUENCE_LENGTH, described, whole_number
from memcallback.devices.catalogue import NCCL_BYTES, Device, DeviceSpec, HostSpec
from memcallback.devices.local import resolve
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchDependentPath, BatchTrace
from memcallback.prediction.length_trace import (
    LengthDependentPath,
    SequenceLengthTrace,
    lengths_to_trace,
)
from memcallback.prediction.prediction import Prediction
from memcallback.step.copies.resizing import has_samples
from memcallback.step.training_step import TrainingStep
from memcallback.trace.traced_step import TracedStep

#: How often the progress of slow traces is reported.
SLOW_S = 2.0
#: One for the step, two to know every batch size.
_NUM_TRACES = 3
#: With other sequence lengths: two batch sizes at two more, and one at a fourth.
_NUM_TRACES_WITH_LENGTHS = _NUM_TRACES + 5
#: Begins the caveat that says why other batch sizes are unknown.
ONLY = "Only batch size"


def predict(
    step: TrainingStep,
    *,
    device: str | int | torch.device | Device | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    settings: AllocatorSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prediction:
    """Predict the memory of a training step to the byte, without a device.

    For a CUDA device, the figures are those that its allocator would show; for a CPU, those of the
    live tensors.

    The step is traced on a copy of fake tensors, three times for a prediction that knows every
    batch size, eight times for one that knows other sequence lengths too. Nothing runs and nothing
    of the user's changes.

    Args:
        step: The step.
        device: The card, such as `NVIDIA A100-SXM4-80GB`; any size, such as `24GiB` or a number of
            bytes; `cpu`; or a device of this machine, such as `cuda:1` or a `torch.device`. By
            default the CUDA device of this machine.
        batch_size: Samples in the batch; by default as many as it has.
        sequence_length: How long the batch's sequences are; by default as long as the step says.
        settings: Those of a card's allocator; by default those of this process's environment
            (PYTORCH_CUDA_ALLOC_CONF).
        progress: Called after each trace but the last, with the number of traces done and of all.

    Returns:
        The prediction, and what was assumed in its `caveats`.

    Raises:
        PredictionError: If the step cannot be traced, or its batch size is unknown.
        ValueError: If `device` is none of these, or is to be of this machine and is not there; or
            if `batch_size` is below 1, or `sequence_length` one that the step says nothing of.
        TypeError: If `step` is no `TrainingStep`, or a number is not whole.
    """
    return predict_without_limits(
        step,
        device=device,
        batch_size=batch_size,
        sequence_length=sequence_length,
        settings=settings,
        progress=progress,
        with_limits=True,
    )


def predict_without_limits(
    step: TrainingStep,
    *,
    device: str | int | torch.device | Device | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    settings: AllocatorSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
    with_limits: bool = False,
) -> Prediction:
    """As `predict`, but without `limit` and `limit_without_retry`, which take about 20 replays."""
    if not isinstance(step, TrainingStep):
        raise TypeError(
            f"step must be a TrainingStep, got {described(step)}. Give TrainingStep(model, batch, "
            "loss=..., optimizer=...)."
        )
    spec = _with_communication(resolve(device), step)
    own_batch_size = step.check_predictable()
    wanted = (
        own_batch_size
        if batch_size is None
        else whole_number(
            "batch_size", batch_size, f"Leave it out for the batch's own, {own_batch_size}."
        )
    )
    length = step.sequence_length
    if sequence_length is not None:
        own = "Leave it out." if length is None else f"Leave it out for the step's own, {length}."
        length = whole_number("sequence_length", sequence_length, own, least=MIN_SEQUENCE_LENGTH)
    trace: BatchTrace | SequenceLengthTrace
    if length is None:
        trace = _batch_trace(Traces(step, spec, _NUM_TRACES, progress), wanted)
    elif step.sequence_length is None:
        raise ValueError(
            f"sequence_length {length} was asked for, and the step does not say how long its "
            "sequences are. Give it: sequence_length=... to TrainingStep."
        )
    else:
        trace = _length_trace(
            Traces(step, spec, _NUM_TRACES_WITH_LENGTHS, progress), wanted, length
        )
    return Prediction.of(trace, spec, batch_size=wanted, settings=settings, with_limits=with_limits)


def _with_communication(device: Device, step: TrainingStep) -> Device:
    """The device with the memory of NCCL if the step has several ranks: the most that was seen."""
    if isinstance(device, HostSpec) or step.ranks is None or step.ranks.world_size == 1:
        return device
    return replace(device, communication_bytes=NCCL_BYTES[1])


def predict_once(
    step: TrainingStep, *, device: Device, batch_size: int, settings: AllocatorSettings
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


def report_progress(say: Callable[[str], None], of: str = "traces") -> Callable[[int, int], None]:
    """A `progress` for `predict` that reports as a part of a sentence, at most every 2 s."""
    start = last = perf_counter()

    def progress(num_done: int, num_all: int) -> None:
        nonlocal last
        now = perf_counter()
        if now - last > SLOW_S:
            last = now
            say(f"{num_done} of {num_all} {of} after {now - start:.1f} s")

    return progress


class Traces:
    """Traces a step at several batch sizes and sequence lengths, and reports progress."""

    def __init__(
        self,
        step: TrainingStep,
        spec: Device,
        num_traces: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._step = step
        self._card = spec if isinstance(spec, DeviceSpec) else None
        self._num_traces = num_traces
        self._num_done = 0
        self._progress = progress
        self._tracer = _load_tracer()
        self._bounds = self._tracer.Bounds()

    @property
    def has_samples(self) -> bool:
        """Whether the batch can be resized to another number of samples."""
        batch_size = self._step.batch_size.batch_size
        return batch_size is not None and has_samples(self._step.batch, batch_size)

    def at(self, batch_size: int, sequence_length: int | None) -> TracedStep:
        """The trace at a batch size and sequence length."""
        with quietly():
            traced: TracedStep = self._tracer.trace(
                self._tracer.TraceRequest(
                    step=self._step,
                    device=self._card,
                    batch_size=batch_size,
                    sequence_length=sequence_length,
                    bounds=self._bounds,
                )
            )
        self._num_done += 1
        if self._progress is not None and self._num_done < self._num_traces:
            self._progress(self._num_done, self._num_traces)
        return traced


def _load_tracer() -> Any:
    """The tracer's module, imported when a step is traced.

    It needs private parts of PyTorch: one that is missing fails a prediction, not the import of a
    callback.
    """
    try:
        from memcallback.trace import tracer
    except (ImportError, AttributeError) as error:
        raise PredictionError(
            f"PyTorch {torch.__version__} lacks a part that tracing needs: {error}. Use a release "
            "of PyTorch that memcallback was tested with"
        ) from error
    return tracer


def _batch_trace(traces: Traces, batch_size: int, sequence_length: int | None = None) -> BatchTrace:
    """The step's trace at any batch size; at one alone, if it takes another path at others."""
    first = traces.at(batch_size, sequence_length)
    if not traces.has_samples:
        caveat = (
            f"{ONLY} {batch_size} is predicted: no tensor of the batch has that first dimension, "
            "so none can be made larger."
        )
        return BatchTrace.single(replace(first, caveats=(*first.caveats, caveat)))
    try:
        second, check = (
            traces.at(size, sequence_length) for size in (batch_size + 1, _far(batch_size))
        )
        return BatchTrace.fit(first, second, check)
    except (BatchDependentPath, PredictionError) as error:
        reason = str(error).rstrip(".")
    caveat = f"{ONLY} {batch_size} is predicted, each other one needs a trace of its own: {reason}."
    return BatchTrace.single(replace(first, caveats=(*first.caveats, caveat)))


def _far(batch_size: int) -> int:
    """A batch size far enough to expose sizes that only look linear nearby."""
    return 2 * batch_size + 3


def _length_trace(traces: Traces, batch_size: int, sequence_length: int) -> SequenceLengthTrace:
    """The step's trace at any sequence length; at one alone, if it takes another path at others."""
    own = _batch_trace(traces, batch_size, sequence_length)
    is_any = own.is_any_batch_size_known

    def traced(length: int) -> BatchTrace:
        first = traces.at(batch_size, length)
        return (
            BatchTrace.fit(first, traces.at(batch_size + 1, length))
            if is_any
            else BatchTrace.single(first)
        )

    _, second, third, last = lengths_to_trace(sequence_length)
    try:
        known = {sequence_length: own, second: traced(second), third: traced(third)}
        return SequenceLengthTrace.fit(
            known, (last, traces.at(_far(batch_size) if is_any else batch_size, last))
        )
    except (BatchDependentPath, LengthDependentPath, PredictionError) as error:
        reason = str(error).rstrip(".")
    caveat = (
        f"Only sequence length {sequence_length} is predicted, each other one needs traces of its "
        f"own: {reason}."
    )
    return SequenceLengthTrace.single(replace(own, caveats=(*own.caveats, caveat)), sequence_length)


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
