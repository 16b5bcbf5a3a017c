"""Peak memory as a function of the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memcallback.core.step_memory import StepMemory, largest
from memcallback.prediction.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class PeakLine:
    """The peak over batch sizes, as a line through one known point, on the safe side of it in both
    directions.

    Attributes:
        batch_size: The batch size of the known point.
        peak_bytes: The peak there.
        growth_bytes: What each further sample adds at most.
        decline_bytes: What each sample less takes off at least; not above `growth_bytes`.
        floor_bytes: What a step needs at any batch size (an optimizer update).
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
        room = budget_bytes - self.peak_bytes
        slope = self.growth_bytes if room >= 0 else self.decline_bytes
        if self.floor_bytes > budget_bytes or (slope == 0 and room < 0):
            return 0
        return max(0, self.batch_size + (room // slope if slope else 0))

    def fits(self, batch_size: int, budget_bytes: int) -> bool:
        """Whether a batch size stays within a budget."""
        return self.at(batch_size) <= budget_bytes


@dataclass(frozen=True, kw_only=True)
class TracedPeak:
    """The reserved peak over batch sizes, replayed at each; on a CPU, which reserves nothing, the
    allocated one.

    Attributes:
        prediction: The traced step at the known point.
        shift_bytes: What a measured step at that point has more than was replayed there, at least
            0; it is added everywhere.
        is_shift_per_sample: Whether it may be memory that every sample needs: above that point it
            is added in proportion to the batch size.
    """

    prediction: Prediction
    shift_bytes: int = 0
    is_shift_per_sample: bool = False

    @property
    def batch_size(self) -> int:
        """The batch size of the known point."""
        return self.prediction.batch_size

    @cached_property
    def _peaks(self) -> dict[int, int]:
        return {}

    def at(self, batch_size: int) -> int:
        """The peak expected at a batch size, of the warm-up step or a steady one."""
        return (
            self._peaks[batch_size]
            if batch_size in self._peaks
            else self._of(self.prediction.at(batch_size))
        )

    def _of(self, one: Prediction) -> int:
        """The peak of the prediction at a batch size."""
        if one.batch_size not in self._peaks:
            shift_bytes = self.shift_bytes
            if self.is_shift_per_sample and one.batch_size > self.batch_size:
                shift_bytes = -(-shift_bytes * one.batch_size // self.batch_size)
            self._peaks[one.batch_size] = (largest(map(counted_peak, one.steps)) or 0) + shift_bytes
        return self._peaks[one.batch_size]

    def largest_within(self, budget_bytes: int) -> int | None:
        """The largest batch size whose peak stays within a budget, without a retry; None if the
        trace cannot tell.

        Some smaller one may need more: of reserved memory a few samples less can leave gaps that
        nothing fits into.
        """
        return self.prediction.largest_batch_size(lambda one: self._fits(one, budget_bytes))

    def fits(self, batch_size: int, budget_bytes: int) -> bool:
        """Whether a batch size stays within a budget, without a retry."""
        return self._fits(self.prediction.at(batch_size), budget_bytes)

    def _fits(self, one: Prediction, budget_bytes: int) -> bool:
        return one.fits_without_retry and self._of(one) <= budget_bytes


def counted_peak(step: StepMemory) -> int | None:
    """The peak that must fit: of reserved memory, on a device without a caching allocator of
    allocated memory; None if unknown.
    """
    return (
        step.peak_allocated_bytes if step.peak_reserved_bytes is None else step.peak_reserved_bytes
    )
