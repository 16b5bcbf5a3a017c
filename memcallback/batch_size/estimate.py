"""Estimates the largest batch that fits, from a prediction, a measured step, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memcallback.batch_size.advice import BatchSizeAdvice, RankBatchSize
from memcallback.batch_size.bounds import DEFAULT_BOUNDS, BatchSizeBounds
from memcallback.batch_size.measured_shift import MeasuredShift, measured_shift
from memcallback.batch_size.peaks import (
    PeakLine,
    TracedPeak,
    limits_of,
    measured_line,
    predicted_line,
)
from memcallback.batch_size.retraced import RetracedSizes
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Stage
from memcallback.core.units import format_bytes
from memcallback.core.validation import DEFAULT_HEADROOM, share
from memcallback.devices.catalogue import Device, DeviceSpec
from memcallback.prediction.asking_apart import asking_apart
from memcallback.prediction.batch_trace import ONLY
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.prediction.search import BatchReplays, Limits, budget
from memcallback.prediction.textbook.law import TextbookPrediction

#: What no step includes, and what a training step does not, unless its validation is predicted too.
NOT_IN_A_STEP = "logging, longer samples"
NOT_IN_TRAINING = f"validation, {NOT_IN_A_STEP}"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The peak over batch sizes, and the largest batch size within a device's memory.

    Attributes:
        peaks: The peak at any batch size.
        largest: The most samples that are sure to fit, with the headroom.
        counts: Which memory `peaks` is of: `reserved` or `allocated`.
        validation: That of the validation after the step, which must fit too; None for none.
        bounds, capacity_bytes, outside_bytes, most_outside_bytes, headroom, is_measured, basis,
        leaves_out, architecture_of, caveats: As in `BatchSizeAdvice`.
    """

    peaks: PeakLine | TracedPeak
    largest: int
    counts: str
    bounds: BatchSizeBounds
    capacity_bytes: int
    outside_bytes: int | None
    headroom: float
    is_measured: bool
    basis: str
    leaves_out: tuple[str, ...]
    architecture_of: str | None = None
    caveats: tuple[str, ...] = ()
    validation: Estimate | None = None
    most_outside_bytes: int | None = None

    def fits(self, batch_size: int) -> bool:
        """Whether the peak of a batch size plus the headroom stays within the device."""
        if not self._knows(batch_size):
            return False
        budget_bytes = budget(
            self.capacity_bytes, self.headroom, self.outside_bytes, self.most_outside_bytes
        )
        fits = self.peaks.fits(batch_size, budget_bytes)
        return fits and (self.validation is None or self.validation.fits(batch_size))

    def peak_at(self, batch_size: int) -> int:
        """The peak at a batch size, of the step or its validation."""
        peak = self.peaks.at(batch_size)
        return peak if self.validation is None else max(peak, self.validation.peak_at(batch_size))

    def _knows(self, batch_size: int) -> bool:
        """Whether no size of the step or its validation is negative at a batch size."""
        traced = self.peaks.replays.trace if isinstance(self.peaks, TracedPeak) else None
        is_known = traced is None or traced.is_in_range(batch_size)
        return is_known and (self.validation is None or self.validation._knows(batch_size))

    @property
    def traced_sizes(self) -> set[int] | None:
        """The sizes that are known, where each takes a trace of the step or its validation."""
        own = self.peaks.traced_sizes if isinstance(self.peaks, TracedPeak) else None
        sizes = None if own is None else {*own}
        other = None if self.validation is None else self.validation.traced_sizes
        return other if sizes is None else sizes if other is None else sizes & other

    def limits(self) -> Limits:
        """The largest batch sizes with nothing kept free."""
        if self.traced_sizes is not None:
            return Limits(at_all=None, without_retry=None)
        own = limits_of(self.peaks, self.capacity_bytes - (self.outside_bytes or 0))
        if self.validation is None:
            return own
        other = self.validation.limits()
        return Limits(
            at_all=_smaller(own.at_all, other.at_all),
            without_retry=_smaller(own.without_retry, other.without_retry),
        )

    def best_batch_size(self) -> int:
        """The largest batch size within the bounds; 0 if not even one sample is sure to fit."""
        return self.bounds.within(self.largest, self.fits)

    def advice(
        self,
        *,
        by_sequence_length: Mapping[int, int] | None = None,
        by_rank: tuple[RankBatchSize, ...] = (),
    ) -> BatchSizeAdvice:
        """The estimate in numbers, with both limits and the curve (replays of a trace)."""
        current = self.peaks.batch_size
        limits = self.limits()
        batch_size = self.best_batch_size()
        traced = self.traced_sizes
        end = 2 * max(batch_size, current)
        if traced is None:
            sizes = {1 << power for power in range(end.bit_length())} | {max(1, batch_size)}
        else:
            sizes = traced | ({batch_size} if batch_size else set())
        sizes |= {current}
        without_retry = limits.without_retry
        return BatchSizeAdvice(
            batch_size=batch_size,
            largest=self.largest,
            limit=limits.at_all,
            limit_without_retry=without_retry,
            limit_fits_again=limits.fits_again,
            limit_without_retry_peak_bytes=self.peak_at(without_retry) if without_retry else None,
            curve=tuple((size, self.peak_at(size)) for size in sorted(filter(self._knows, sizes))),
            counts=self.counts,
            current_batch_size=current,
            bounds=self.bounds,
            capacity_bytes=self.capacity_bytes,
            outside_bytes=self.outside_bytes,
            most_outside_bytes=self.most_outside_bytes,
            headroom=self.headroom,
            is_measured=self.is_measured,
            basis=self.basis,
            leaves_out=self.leaves_out,
            architecture_of=self.architecture_of,
            caveats=self.caveats,
            by_sequence_length=by_sequence_length or {},
            by_rank=by_rank,
            # Who asks later has the advice alone, and nothing to trace.
            fits_at=self.fits if traced is None else None,
        )


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)


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
    """The largest batch size that `estimate` finds, in numbers."""

    def advice() -> BatchSizeAdvice | None:
        result = estimate(
            measured=measured,
            predicted=predicted,
            always_held_bytes=always_held_bytes,
            capacity_bytes=capacity_bytes,
            outside_bytes=outside_bytes,
            headroom=headroom,
            bounds=bounds,
        )
        return None if result is None else result.advice()

    return asking_apart(advice)


def estimate(
    *,
    measured: StepMemory | None,
    predicted: StepPrediction | None,
    always_held_bytes: int | None = None,
    capacity_bytes: int | None,
    outside_bytes: int | None = None,
    most_outside_bytes: int | None = None,
    headroom: float = DEFAULT_HEADROOM,
    bounds: BatchSizeBounds = DEFAULT_BOUNDS,
) -> Estimate | None:
    """The largest batch size whose peak plus headroom stays within a capacity.

    A traced prediction is replayed at each batch size. If a measured step reserved more than its
    replay, the difference is added everywhere; beyond the band of a prediction it grows in
    proportion to the batch size.

    Without a trace, a measured steady step bounds the peak from above. At each moment of a step,
    memory is a straight line over the batch size, so the peak is convex:

    - For larger batches, all of the peak of the other phases grows, except memory that is
      persistent throughout the step (gradients are not, where they are cleared before the
      activations come). What an update itself makes does not grow.
    - For smaller batches, (peak - peak of an empty batch) shrinks in proportion. The empty-batch
      peak is at least the optimizer step's and, if predicted, all memory independent of the batch
      (autocast's copies of the weights). No more is saved than autograd keeps of each sample.
      Without a prediction this is uncertain, and `leaves_out` says so.

    On a device without a caching allocator the allocated peak counts. Without a measured step, or
    without a count of persistent memory, the textbook estimate decides; it
    knows allocated memory only.
    """
    check_headroom(headroom)
    if capacity_bytes is None:
        return None
    if isinstance(predicted, Prediction):
        shift = None
        if measured is not None and predicted.trace.is_any_batch_size_known:
            shift = measured_shift(predicted, measured, _replays(predicted, capacity_bytes))
        traced = estimate_from_trace(
            predicted,
            shift,
            capacity_bytes=capacity_bytes,
            outside_bytes=outside_bytes,
            most_outside_bytes=most_outside_bytes,
            headroom=headroom,
            bounds=bounds,
        )
        if traced is not None and predicted.trace.is_far(traced.best_batch_size()):
            untried = (
                "a check that the step runs the same way with so large a batch (the largest traced "
                f"is {predicted.trace.largest_traced:,})"
            )
            return replace(traced, leaves_out=(*traced.leaves_out, untried))
        if traced is not None:
            return traced
    law = predicted if isinstance(predicted, TextbookPrediction) else None
    line = measured_line(measured, always_held_bytes, law) if measured else None
    is_measured = line is not None
    if line is None and law is not None:
        line = predicted_line(law)
    if line is None:
        return None
    largest = line.largest_within(budget(capacity_bytes, headroom, outside_bytes))
    leaves_out = _always_left_out(outside_bytes)
    if not is_measured:
        leaves_out.append(
            "the allocator's reserved but unallocated memory, kernel workspaces and rounding"
        )
    elif largest < line.batch_size and law is None:
        leaves_out.append(
            "memory that does not shrink with the batch (only a prediction shows it), so test the "
            "suggested batch size first"
        )
    is_reserved = is_measured and measured is not None and measured.peak_reserved_bytes is not None
    counts = "reserved" if is_reserved else "allocated"
    return Estimate(
        peaks=line,
        largest=largest,
        counts=counts,
        bounds=bounds,
        capacity_bytes=capacity_bytes,
        outside_bytes=outside_bytes,
        headroom=headroom,
        is_measured=is_measured,
        basis=f"The peaks follow from the {counts} memory measured on this device at one batch size"
        + (", so a larger batch may fit, too" if largest >= line.batch_size else "")
        if is_measured
        else f"The peaks are predicted by the {law.source if law else ''}",
        leaves_out=tuple(leaves_out),
    )


def check_headroom(headroom: object) -> None:
    """Raise unless a headroom is a fraction of a capacity."""
    share("headroom", headroom, "0.05 keeps 5 % of the device free.")


def _always_left_out(outside_bytes: int | None) -> list[str]:
    leaves_out = [NOT_IN_TRAINING]
    if outside_bytes is None:
        leaves_out.append(
            "memory outside this process's allocator (CUDA context, other processes), unknown here"
        )
    return leaves_out


def _assumed(device: Device) -> str:
    """What is assumed to be outside the allocator, and its verb."""
    has_ranks = isinstance(device, DeviceSpec) and device.communication_bytes
    return "the CUDA context and NCCL are" if has_ranks else "the CUDA context is"


def _replays(predicted: Prediction, capacity_bytes: int) -> BatchReplays:
    """Replays on the device with a capacity, which may be another one than the device's."""
    device = replace(predicted.device, capacity_bytes=capacity_bytes)
    return BatchReplays(predicted.trace, device, predicted.settings)


def estimate_from_trace(
    predicted: Prediction,
    shift: MeasuredShift | None = None,
    *,
    capacity_bytes: int,
    outside_bytes: int | None = None,
    most_outside_bytes: int | None = None,
    headroom: float = DEFAULT_HEADROOM,
    bounds: BatchSizeBounds = DEFAULT_BOUNDS,
    bucket_bytes: int = 0,
    retraced: RetracedSizes | None = None,
) -> Estimate | None:
    """As `estimate`, from the replayed peaks alone; None if no batch size is the largest.

    Where the trace knows its own batch size alone, from traces at others, if there are any.
    """
    replays = _replays(predicted, capacity_bytes)
    device = replays.device
    if not predicted.trace.is_any_batch_size_known:
        if retraced is None:
            return None
        replays = retraced = retraced.on(device)
    else:
        retraced = None
    peaks = TracedPeak(replays=replays, batch_size=predicted.batch_size, shift_bytes=bucket_bytes)
    basis = "The peaks were simulated from a trace"
    if retraced is not None:
        basis += " at each batch size that was tried"
    if bucket_bytes:
        basis += f", with {format_bytes(bucket_bytes)} for the buckets of DistributedDataParallel"
    if shift is not None:
        peaks = TracedPeak(
            replays=replays,
            batch_size=shift.batch_size,
            shift_bytes=max(bucket_bytes, shift.more_bytes),
            is_shift_per_sample=shift.is_beyond(bucket_bytes),
        )
        basis += shift.basis(bucket_bytes)
    is_read = outside_bytes is not None
    if outside_bytes is None:
        outside_bytes, most_outside_bytes = device.outside_bytes, device.most_outside_bytes
    budget_bytes = budget(capacity_bytes, headroom, outside_bytes, most_outside_bytes)
    largest = peaks.largest_within(budget_bytes)
    if largest is None and bounds.most is not None and peaks.fits(bounds.most, budget_bytes):
        largest = bounds.most
    if largest is None:
        return None
    at_all = peaks.largest_at_all(capacity_bytes - outside_bytes)
    if at_all is not None and largest > at_all:
        largest = replays.largest_up_to(at_all, lambda size: peaks.fits(size, budget_bytes))
    leaves_out = _always_left_out(outside_bytes)
    if predicted.step.stage is not Stage.TRAINING:
        leaves_out[0] = NOT_IN_A_STEP
    kept = ""
    if most_outside_bytes is not None and (
        budget_bytes < budget(capacity_bytes, headroom, outside_bytes)
    ):
        kept = (
            f"; a context can be larger, so {format_bytes(most_outside_bytes)} in all are kept free"
        )
    if not is_read and outside_bytes:
        leaves_out.append(
            f"other processes on the device (only {_assumed(device)} counted, with "
            f"{format_bytes(outside_bytes)}{kept})"
        )
    elif is_read and most_outside_bytes is not None:
        leaves_out.append(
            "the real size of the CUDA context: it is not open yet "
            f"({format_bytes(outside_bytes)} are assumed for it and for other processes{kept})"
        )
    if retraced is not None and retraced.cut_off is not None:
        leaves_out.append(f"batches above {retraced.cut_off:,}, which would take minutes to trace")
    if retraced is not None and retraced.untraced is not None:
        leaves_out.append(
            f"batch sizes at which the step cannot be traced, such as {retraced.untraced:,}"
        )
    is_host = predicted.peak_reserved_bytes is None
    if shift is None and is_host:
        leaves_out.append("temporary memory inside operators")
    return Estimate(
        peaks=peaks,
        largest=largest,
        counts="allocated" if is_host else "reserved",
        bounds=bounds,
        capacity_bytes=capacity_bytes,
        outside_bytes=outside_bytes,
        most_outside_bytes=most_outside_bytes,
        headroom=headroom,
        is_measured=False,
        basis=basis,
        leaves_out=tuple(leaves_out),
        architecture_of=_architecture_of(predicted, capacity_bytes),
        caveats=tuple(
            caveat
            for caveat in dict.fromkeys((*predicted.trace.caveats, *predicted.device.caveats))
            if not caveat.startswith(ONLY)  # other sizes were traced
        ),
    )


def _architecture_of(predicted: Prediction, capacity_bytes: int) -> str | None:
    """The card that was traced for a capacity that is not its own."""
    device = predicted.device
    if not isinstance(device, DeviceSpec):
        return None
    if capacity_bytes != device.capacity_bytes:
        return device.architecture_of or device.name
    return device.architecture_of
