"""RetracedSizes: a step at batch sizes that are each traced, for steps that differ at each size."""

from __future__ import annotations

from collections.abc import Callable

from memcallback.core.errors import PredictionError
from memcallback.devices.catalogue import Device
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.search import BatchReplays, Outcome

#: A result is found to within this share of itself, and exactly below as many samples.
_DIVISOR = 64
#: Two sizes further apart than this share of one of them show how memory grows.
_STEP_DIVISOR = 8
#: The next size is at most so many times the largest that is known.
_LONGEST_STEP = 8
#: Every so many tries the middle is tried, where straight lines come near from one side alone.
_BISECT_EVERY = 3
#: A size that cannot be traced is none that fits.
_UNTRACED = Outcome(
    is_out_of_memory=True, num_alloc_retries=0, peak_allocated_bytes=0, peak_reserved_bytes=None
)


class RetracedSizes(BatchReplays):
    """Replays of a step at any batch size, from a trace at that size.

    For a step whose trace says nothing of other sizes: it loops over its samples, as detection
    models do over images, or chooses other kernels at each size. A trace takes seconds, so searches
    try few sizes: those where straight lines through known peaks reach the capacity.
    """

    def __init__(
        self,
        own: BatchTrace,
        device: Device,
        settings: AllocatorSettings,
        trace_at: Callable[[int], BatchTrace],
    ) -> None:
        """Start from a trace at one batch size."""
        super().__init__(own, device, settings)
        self._trace_at = trace_at
        self._traces: dict[int, BatchTrace | None] = {own.batch_size: own}

    @property
    def traced_sizes(self) -> list[int]:
        """The batch sizes that were traced, smallest first."""
        return sorted(size for size, trace in self._traces.items() if trace is not None)

    def on(self, device: Device) -> RetracedSizes:
        """The same on a device of another size, from the same traces."""
        other = RetracedSizes(self.trace, device, self.settings, self._trace_at)
        other._outcomes, other._traces = self._outcomes, self._traces
        return other

    def is_traceable(self, batch_size: int) -> bool:
        """Whether the step can be traced at a batch size."""
        if batch_size not in self._traces:
            try:
                self._traces[batch_size] = self._trace_at(batch_size)
            except PredictionError:
                self._traces[batch_size] = None
        return self._traces[batch_size] is not None

    def largest(
        self, holds: Callable[[int], bool], *, start: int, by_allocated: bool = False
    ) -> int | None:
        """The largest batch size found for which `holds(batch_size)`; None if memory does not grow.

        0 if it fails for one sample. At least 1 part in 64 more samples do not fit.
        """
        return self._search(holds, None)

    def largest_up_to(self, most: int, holds: Callable[[int], bool]) -> int:
        """The largest batch size found up to one for which `holds(batch_size)`; 0 if none is."""
        return self._search(holds, most) or 0

    def _search(self, holds: Callable[[int], bool], most: int | None) -> int | None:
        known = [size for size in self.traced_sizes if most is None or size <= most]
        good = max((size for size in known if holds(size)), default=0)
        bad = min((size for size in known if size > good), default=None)
        if bad is None and most is not None:
            bad = most + 1
        number = 0
        while bad is None or bad - good > max(1, bad // _DIVISOR):
            number += 1
            size = self._crossing(good)
            if bad is None:
                if size is None and not self._grows():
                    return None
                size = max(good + 1, size or 2 * good)
                size = min(size, _LONGEST_STEP * max(1, good))
            elif size is None or number % _BISECT_EVERY == 0:
                size = (good + bad) // 2
            else:
                size = min(max(good + 1, size), bad - 1)
            if holds(size):
                good = size
            else:
                bad = size
        return good

    def _grows(self) -> bool:
        """Whether the largest traced size needs more than the smallest."""
        sizes = self.traced_sizes
        return self.peak_bytes(sizes[-1]) > self.peak_bytes(sizes[0])

    def _crossing(self, near: int) -> int | None:
        """Where a line through traced sizes reaches the capacity; None if it does nowhere.

        Through the one nearest to a size, and another at some distance: reserved memory grows in
        steps.
        """
        capacity_bytes = self.device.allocator_capacity_bytes
        here = min(self.traced_sizes, key=lambda size: abs(size - near))
        others = [size for size in self.traced_sizes if abs(size - here) > here // _STEP_DIVISOR]
        if capacity_bytes is None or not others:
            return None
        there = min(others, key=lambda size: abs(size - here))
        slope = (self.peak_bytes(there) - self.peak_bytes(here)) / (there - here)
        return None if slope <= 0 else int(here + (capacity_bytes - self.peak_bytes(here)) / slope)

    def _outcome(self, trace: BatchTrace, batch_size: int, capacity_bytes: int | None) -> Outcome:
        if not self.is_traceable(batch_size):
            return _UNTRACED
        return super()._outcome(self._traces[batch_size] or trace, batch_size, capacity_bytes)
