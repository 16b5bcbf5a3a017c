"""The peak of a step over its batch size: replayed from a trace, or a line through one point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from memcallback.batch_size.retraced import RetracedSizes
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.search import BatchReplays, Limits
from memcallback.prediction.textbook.law import TextbookPrediction


@dataclass(frozen=True, kw_only=True)
class PeakLine:
    """The peak over batch sizes: a bent line through one known point, never below the true peak.

    Attributes:
        batch_size: The batch size of the known point.
        peak_bytes: The peak there.
        growth_bytes: The most that each further sample adds.
        decline_bytes: The least that each sample less saves; at most `growth_bytes`.
        floor_bytes: The memory of a step at any batch size (an optimizer update).
    """

    batch_size: int
    peak_bytes: int
    growth_bytes: int
    decline_bytes: int
    floor_bytes: int

    def at(self, batch_size: int) -> int:
        """The peak expected at a batch size."""
        slope = self.growth_bytes if batch_size > self.batch_size else self.decline_bytes
        return max(self.floor_bytes, self.peak_bytes + (batch_size - self.batch_size) * slope)

    def largest_within(self, budget_bytes: int) -> int:
        """The largest batch size whose peak stays within a budget; 0 if none does."""
        left = budget_bytes - self.peak_bytes
        slope = self.growth_bytes if left >= 0 else self.decline_bytes
        if self.floor_bytes > budget_bytes or (slope == 0 and left < 0):
            return 0
        return max(0, self.batch_size + (left // slope if slope else 0))

    def fits(self, batch_size: int, budget_bytes: int) -> bool:
        """Whether a batch size stays within a budget."""
        return self.at(batch_size) <= budget_bytes


@dataclass(frozen=True, kw_only=True)
class TracedPeak:
    """The peak over batch sizes, replayed at each: reserved memory, on a CPU allocated.

    Attributes:
        replays: Replays of the step at any batch size.
        batch_size: The batch size of the known point, from which searches start.
        shift_bytes: How much more a measured step at that point needs than its replay, at least 0;
            added at every batch size.
        is_shift_per_sample: Whether the shift may be memory of each sample: above the known point
            it grows in proportion to the batch size.
    """

    replays: BatchReplays
    batch_size: int
    shift_bytes: int = 0
    is_shift_per_sample: bool = False

    @classmethod
    def of(cls, prediction: Prediction) -> TracedPeak:
        """The replayed peaks of a predicted step."""
        replays = BatchReplays(prediction.trace, prediction.device, prediction.settings)
        return cls(replays=replays, batch_size=prediction.batch_size)

    @property
    def traced_sizes(self) -> list[int] | None:
        """The only sizes that are known, where each takes a trace; None if every size is known."""
        return self.replays.traced_sizes if isinstance(self.replays, RetracedSizes) else None

    def at(self, batch_size: int) -> int:
        """The peak of the warm-up step or a steady one, whichever is larger."""
        shift_bytes = self.shift_bytes
        if self.is_shift_per_sample and batch_size > self.batch_size:
            shift_bytes = -(-shift_bytes * batch_size // self.batch_size)
        return self.replays.peak_bytes(batch_size) + shift_bytes

    def fits(self, batch_size: int, budget_bytes: int) -> bool:
        """Whether a batch size stays within a budget, without a retry."""
        return self.replays.fits_without_retry(batch_size) and self.at(batch_size) <= budget_bytes

    def largest_within(self, budget_bytes: int) -> int | None:
        """The largest batch size within a budget, without a retry; None if unknown or unlimited.

        Some smaller sizes may need more: with a few samples less, reserved memory can have gaps
        that nothing fits into.
        """
        if isinstance(self.replays, RetracedSizes):
            return self.replays.largest_within(
                lambda batch_size: self.fits(batch_size, budget_bytes),
                budget_bytes - self.shift_bytes,
            )
        return self.replays.largest(
            lambda batch_size: self.fits(batch_size, budget_bytes), start=self.batch_size
        )

    def on(self, free_bytes: int) -> BatchReplays:
        """Replays on a device on which so much is free for the step and its shift."""
        device = self.replays.device
        capacity_bytes = free_bytes - self.shift_bytes + device.outside_bytes
        return self.replays.on(replace(device, capacity_bytes=capacity_bytes))

    def largest_at_all(self, free_bytes: int) -> int | None:
        """The largest batch size that fits with nothing kept free, perhaps with retries.

        None if unknown or unlimited. Unknown where each size takes a trace: a search would take as
        long again.
        """
        if self.traced_sizes is not None:
            return None
        return self.on(free_bytes).largest_at_all(self.batch_size)


def counted_peak(step: StepMemory) -> int | None:
    """The peak that must fit: reserved memory, on a CPU allocated; None if unknown."""
    reserved = step.peak_reserved_bytes
    return step.peak_allocated_bytes if reserved is None else reserved


def limits_of(peaks: PeakLine | TracedPeak, free_bytes: int) -> Limits:
    """The largest batch sizes that fit with nothing kept free; `at_all` only by a trace.

    Unknown where each size takes a trace: searches for them too would take as long again.
    """
    if isinstance(peaks, TracedPeak) and peaks.traced_sizes is not None:
        return Limits(at_all=None, without_retry=None)
    without_retry = peaks.largest_within(free_bytes)
    if not isinstance(peaks, TracedPeak):
        return Limits(at_all=None, without_retry=without_retry)
    limits = peaks.on(free_bytes).limits(peaks.batch_size)
    if limits.at_all is None or without_retry is None or without_retry <= limits.at_all:
        return replace(limits, without_retry=without_retry)
    smaller = peaks.replays.largest_up_to(limits.at_all, lambda size: peaks.fits(size, free_bytes))
    return replace(limits, without_retry=smaller)


def measured_line(
    step: StepMemory, always_held_bytes: int | None, predicted: TextbookPrediction | None
) -> PeakLine | None:
    """The line through a measured step; None if too little of it is known."""
    persistent = step.always_held_bytes if step.always_held_bytes is not None else always_held_bytes
    allocated, peak = step.peak_allocated_bytes, counted_peak(step)
    if not step.batch_size or peak is None or allocated is None or persistent is None:
        return None
    update = step.phases.get(Phase.OPTIMIZER_STEP)
    of_update = max(persistent, (update.peak_allocated_bytes or 0) if update else 0)
    per_allocated = Fraction(peak, allocated) if allocated else Fraction(1)
    # A part of the allocated peak takes at most the same share of reserved memory.
    floor = min(peak, ceil(of_update * per_allocated))
    without_samples, decline = floor, peak
    if predicted:
        law = predicted_line(predicted)
        without_samples = max(floor, min(peak, ceil(law.at(0) * per_allocated)))
        decline = predicted.input.per_sample_bytes + predicted.saved.per_sample_bytes
    most_with_samples = min(peak, ceil(_peak_with_samples(step) * per_allocated))
    return PeakLine(
        batch_size=step.batch_size,
        peak_bytes=peak,
        growth_bytes=-(-max(0, most_with_samples - persistent) // step.batch_size),
        decline_bytes=min((peak - without_samples) // step.batch_size, decline),
        floor_bytes=floor,
    )


def _peak_with_samples(step: StepMemory) -> int:
    """The most allocated but for what an update itself makes, which no batch size changes."""
    # An update that nothing marks a backward pass before may have that pass inside.
    is_marked = any(Phase.BACKWARD in window.covers for window in step.windows)
    sizes = (
        window.start.allocated_bytes
        if is_marked and window.covers == (Phase.OPTIMIZER_STEP,)
        else window.peak_allocated_bytes
        for window in step.windows
    )
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(step.windows) else step.peak_allocated_bytes or 0


def predicted_line(prediction: TextbookPrediction) -> PeakLine:
    """The line of the textbook estimate."""
    phases = prediction.phases
    return PeakLine(
        batch_size=prediction.batch_size,
        peak_bytes=phases[Phase.BACKWARD].peak_allocated_bytes or 0,
        growth_bytes=prediction.per_sample_bytes,
        decline_bytes=prediction.per_sample_bytes,
        floor_bytes=(phases[Phase.OPTIMIZER_STEP].peak_allocated_bytes or 0)
        - prediction.input.at(prediction.batch_size),
    )
