"""The largest batch from a prediction and/or a measured step."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

from memcallback.batch_size.advice import (
    DEFAULT_BOUNDS,
    DEFAULT_HEADROOM,
    BatchSizeAdvice,
    BatchSizeBounds,
)
from memcallback.batch_size.peaks import PeakLine, TracedPeak, counted_peak
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.core.units import format_bytes
from memcallback.core.validation import share
from memcallback.prediction.comparison import RESERVED_SHARE, allocated_band
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.protocol import StepPrediction
from memcallback.prediction.textbook.law import TextbookPrediction


def suggest(
    *,
    measured: StepMemory | None,
    predicted: StepPrediction | None,
    always_held_bytes: int | None = None,
    capacity_bytes: int | None,
    outside_bytes: int | None = None,
    headroom: float = DEFAULT_HEADROOM,
    bounds: BatchSizeBounds = DEFAULT_BOUNDS,
) -> BatchSizeAdvice | None:
    """The largest batch size whose peak plus headroom stays within a capacity.

    A step's peak is, over the batch size, the largest of straight lines, one for each moment of the
    step, and so convex. With a measured steady step this bounds it from above on both sides. A
    larger batch is taken to grow all of the peak but what is held throughout the step (counted:
    gradients are not, where they are cleared before the activations). A smaller one is taken to
    save in proportion what the peak has above that of a step of no samples, which is at least the
    measured optimizer step and, by the prediction, all that is held and what else does not depend
    on the batch (autocast's copies of the weights); and not more than what autograd keeps of each
    sample. Without a prediction that is not sure, and said to be so. A device without a caching
    allocator has no reserved memory, and its allocated peak counts instead. Without a measured
    step, or without a count of what is held, the law of the prediction decides, which knows
    allocated memory only.

    A traced prediction needs no bounds: its reserved peak is replayed at each batch size. What a
    measured step reserved more than was replayed for it is added everywhere, beyond the band of a
    prediction in proportion to the batch size.
    """
    check_headroom(headroom)
    if capacity_bytes is None:
        return None
    if isinstance(predicted, Prediction):
        traced = from_trace(
            predicted,
            measured,
            capacity_bytes=capacity_bytes,
            outside_bytes=outside_bytes,
            headroom=headroom,
            bounds=bounds,
        )
        if traced is not None and predicted.trace.is_far(traced.batch_size):
            untried = f"whether the step does the same in so large a batch: the largest that was traced is {predicted.trace.largest_traced}"
            return replace(traced, leaves_out=(*traced.leaves_out, untried))
        if traced is not None:
            return traced
    law = predicted if isinstance(predicted, TextbookPrediction) else None
    line = _measured_line(measured, always_held_bytes, law) if measured else None
    is_measured = line is not None
    if line is None and law is not None:
        line = _predicted_line(law)
    if line is None:
        return None
    largest = line.largest_within(int(capacity_bytes * (1 - headroom)) - (outside_bytes or 0))
    leaves_out = _always_left_out(outside_bytes)
    if not is_measured:
        leaves_out.append(
            "the allocator's reserved but unallocated memory, kernel workspaces and rounding"
        )
    elif largest < line.batch_size and law is None:
        leaves_out.append(
            "how much a smaller batch saves, which only a prediction tells: try it before relying on it"
        )
    return BatchSizeAdvice(
        largest=largest,
        bounds=bounds,
        line=line,
        capacity_bytes=capacity_bytes,
        outside_bytes=outside_bytes,
        headroom=headroom,
        is_measured=is_measured,
        basis=_basis(measured, law, is_measured=is_measured),
        leaves_out=tuple(leaves_out),
    )


def check_headroom(headroom: object) -> None:
    """See that a headroom is a fraction of a capacity."""
    share("headroom", headroom, "0.05 keeps 5 % of the device free.")


def _always_left_out(outside_bytes: int | None) -> list[str]:
    leaves_out = ["what validation, logging and longer samples need beyond a training step"]
    if outside_bytes is None:
        leaves_out.append(
            "memory outside this process's allocator (CUDA context, other processes), which is not known here"
        )
    return leaves_out


def from_trace(
    predicted: Prediction,
    measured: StepMemory | None = None,
    *,
    capacity_bytes: int,
    outside_bytes: int | None = None,
    headroom: float = DEFAULT_HEADROOM,
    bounds: BatchSizeBounds = DEFAULT_BOUNDS,
    bucket_bytes: int = 0,
) -> BatchSizeAdvice | None:
    """As `suggest`, from the replayed peaks alone, whether or not the step was traced near the
    suggestion.
    """
    if not predicted.trace.is_any_batch_size_known:
        return None
    # The memory to plan for need not be that of the device.
    predicted = predicted.on(replace(predicted.device, capacity_bytes=capacity_bytes))
    here, line = predicted, TracedPeak(prediction=predicted, shift_bytes=bucket_bytes)
    measured_bytes = counted_peak(measured) if measured else None
    basis = f"replayed from the {predicted.source}"
    if bucket_bytes:
        basis += f", with {format_bytes(bucket_bytes)} for the buckets of DistributedDataParallel"
    if measured and measured.batch_size and measured_bytes is not None:
        here = predicted.at(measured.batch_size)
        shift_bytes = max(
            bucket_bytes, measured_bytes - TracedPeak(prediction=predicted).at(measured.batch_size)
        )
        band_bytes = (
            allocated_band(measured_bytes)
            if measured.peak_reserved_bytes is None
            else RESERVED_SHARE * measured_bytes
        )
        is_beyond = shift_bytes > bucket_bytes + band_bytes
        line = TracedPeak(prediction=here, shift_bytes=shift_bytes, is_shift_per_sample=is_beyond)
        basis += (
            f", raised by the {format_bytes(shift_bytes)} that were measured more"
            if is_beyond
            else ", which the measured step bears out"
        )
    outside = predicted.device.outside_bytes if outside_bytes is None else outside_bytes
    budget_bytes = int(capacity_bytes * (1 - headroom)) - outside
    found = line.largest_within(budget_bytes)
    if found is None and bounds.most is not None and line.fits(bounds.most, budget_bytes):
        found = bounds.most
    if found is None:
        return None
    leaves_out = _always_left_out(outside)
    if outside_bytes is None and outside:
        leaves_out.append(
            f"other processes on the device; its context is taken to be {format_bytes(outside)}"
        )
    if measured is None and here.peak_reserved_bytes is None:
        leaves_out.append("what operators take for themselves while they run")
    return BatchSizeAdvice(
        largest=found,
        bounds=bounds,
        line=line,
        capacity_bytes=capacity_bytes,
        outside_bytes=outside,
        headroom=headroom,
        is_measured=False,
        basis=basis,
        leaves_out=tuple(leaves_out),
    )


def _basis(
    measured: StepMemory | None, predicted: TextbookPrediction | None, *, is_measured: bool
) -> str:
    if is_measured and measured is not None:
        return f"from the {'allocated' if measured.peak_reserved_bytes is None else 'reserved'} memory measured on this device"
    assert predicted is not None
    return f"predicted by the {predicted.source}"


def _measured_line(
    step: StepMemory, always_held_bytes: int | None, predicted: TextbookPrediction | None
) -> PeakLine | None:
    held = step.always_held_bytes if step.always_held_bytes is not None else always_held_bytes
    allocated, peak = step.peak_allocated_bytes, counted_peak(step)
    if not step.batch_size or peak is None or allocated is None or held is None:
        return None
    update = step.phases.get(Phase.OPTIMIZER_STEP)
    of_update = max(held, (update.peak_allocated_bytes or 0) if update else 0)
    per_allocated = Fraction(peak, allocated) if allocated else Fraction(1)
    # Of reserved memory each takes at most the share that it has of the allocated peak.
    floor = min(peak, ceil(of_update * per_allocated))
    without_samples, decline = floor, peak
    if predicted:
        law = _predicted_line(predicted)
        without_samples = max(floor, min(peak, ceil(law.at(0) * per_allocated)))
        decline = predicted.input.per_sample_bytes + predicted.saved.per_sample_bytes
    return PeakLine(
        batch_size=step.batch_size,
        peak_bytes=peak,
        growth_bytes=-(-max(0, peak - held) // step.batch_size),
        decline_bytes=min((peak - without_samples) // step.batch_size, decline),
        floor_bytes=floor,
    )


def _predicted_line(prediction: TextbookPrediction) -> PeakLine:
    phases = prediction.phases
    return PeakLine(
        batch_size=prediction.batch_size,
        peak_bytes=phases[Phase.BACKWARD].peak_allocated_bytes or 0,
        growth_bytes=prediction.per_sample_bytes,
        decline_bytes=prediction.per_sample_bytes,
        floor_bytes=(phases[Phase.OPTIMIZER_STEP].peak_allocated_bytes or 0)
        - prediction.input.at(prediction.batch_size),
    )
