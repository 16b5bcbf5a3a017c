"""RetracedSizes: a step at batch sizes that are each traced, for steps that differ at each size."""

from __future__ import annotations

from collections.abc import Callable

from memcallback.core.allocation_trace import Alloc
from memcallback.core.errors import PredictionError
from memcallback.core.validation import MAX_BATCH_SIZE
from memcallback.devices.catalogue import Device
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.search import BatchReplays, Outcome

#: A result is found to within this share of itself, and exactly below as many samples.
_DIVISOR = 64
#: Two sizes further apart than this share of one of them show how memory grows.
_FAR_DIVISOR = 8
#: The next size is at most so many times the largest that is known.
_LONGEST_STEP = 8
#: Every so many tries the middle is tried, where straight lines come near from one side alone.
_BISECT_EVERY = 3
#: A trace with more events takes a minute or more.
_MOST_EVENTS = 60_000
#: A size that cannot be traced is none that fits.
_UNTRACED = Outcome(
    is_out_of_memory=True, num_alloc_retries=0, peak_allocated_bytes=0, peak_reserved_bytes=None
)


class RetracedSizes(BatchReplays):
    """Replays of a step at any batch size, from a trace at that size.

    For a step whose trace says nothing of other sizes: it loops over its samples, as detection
    models do over images, or chooses other kernels at each size. A trace takes seconds, so a search
    tries few sizes: those where straight lines through known peaks reach what may be used.

    Attributes:
        cut_off: The largest size traced, where a larger one would take too long; else None.
        untraced: A size that could not be traced; None if each could.
    """

    def __init__(
        self,
        own: BatchTrace,
        device: Device,
        settings: AllocatorSettings,
        trace_at: Callable[[int], BatchTrace],
        most: int | None = None,
    ) -> None:
        """Start from a trace at one batch size; no size above `most` is tried."""
        super().__init__(own, device, settings)
        self._trace_at = trace_at
        self._most = most
        self._traces: dict[int, BatchTrace | None] = {own.batch_size: own}
        #: Sizes are multiples of it: of the own size, if others cannot be traced.
        self._unit = 1
        self.cut_off: int | None = None
        self.untraced: int | None = None

    @property
    def traced_sizes(self) -> list[int]:
        """The batch sizes that were traced, smallest first."""
        return sorted(size for size, trace in self._traces.items() if trace is not None)

    def on(self, device: Device) -> RetracedSizes:
        """The same on a device of another size, from the same traces."""
        other = RetracedSizes(self.trace, device, self.settings, self._trace_at, self._most)
        other._outcomes, other._traces, other._unit = self._outcomes, self._traces, self._unit
        return other

    def is_traceable(self, batch_size: int) -> bool:
        """Whether the step can be traced at a batch size."""
        if batch_size not in self._traces:
            try:
                self._traces[batch_size] = self._trace_at(batch_size)
            except PredictionError:
                self._traces[batch_size] = None
        return self._traces[batch_size] is not None

    def largest_within(self, holds: Callable[[int], bool], budget_bytes: int) -> int | None:
        """The largest batch size found for which it holds; None if memory does not grow.

        It is below each traced size that fails, and a size at most 1 part in 64 larger fails. 0 if
        it fails for one sample. The budget says where to look.
        """
        failing = [size for size in self.traced_sizes if not holds(size)]
        bad = min(failing, default=None)
        good = max(
            (size for size in self.traced_sizes if bad is None or size < bad),
            default=0,
        )
        number = 0
        while bad is None or bad - good > max(self._unit, bad // _DIVISOR):
            number += 1
            size = self._crossing(good, budget_bytes)
            last = self._last_size() if bad is None else bad - 1
            least = good + self._unit
            if bad is None:
                if size is None and not self._grows():
                    return None
                size = min(size or 2 * good, _LONGEST_STEP * max(1, good))
                least = good + max(self._unit, good // _DIVISOR)
            elif size is None or not good < size < bad or number % _BISECT_EVERY == 0:
                size = (good + bad) // 2
            size = max(size, least) // self._unit * self._unit
            size = min(size, last // self._unit * self._unit)
            if size <= good:
                if bad is None and (self._most is None or good + self._unit <= self._most):
                    self.cut_off = good
                return good
            if not self.is_traceable(size):
                self.untraced = size
                if size % self.trace.batch_size:
                    # Some steps take whole groups of samples alone.
                    self._unit = self.trace.batch_size
                    continue
                bad = size
            elif holds(size):
                good = size
            else:
                bad = size
        return good

    def _last_size(self) -> int:
        """The largest size to try: a larger one is not wanted, or its trace would take too long."""
        sizes = self.traced_sizes
        first, last = sizes[0], sizes[-1]
        more_events = self._num_events(last) - self._num_events(first)
        size = MAX_BATCH_SIZE if self._most is None else min(self._most, MAX_BATCH_SIZE)
        if more_events > 0:
            per_sample = more_events / (last - first)
            size = min(size, last + int((_MOST_EVENTS - self._num_events(last)) / per_sample))
        return max(size, 0)

    def _num_events(self, batch_size: int) -> int:
        return len(self._traced(batch_size).at(batch_size).events)

    def _grows(self) -> bool:
        """Whether the largest traced size allocates more than the smallest, whatever its peak.

        Of a single size nobody knows.
        """
        if len(self.traced_sizes) < 2:
            return True
        first, last = (
            sum(
                event.size_bytes
                for event in self._traced(size).at(size).events
                if isinstance(event, Alloc)
            )
            for size in (self.traced_sizes[0], self.traced_sizes[-1])
        )
        return last > first

    def _crossing(self, near: int, budget_bytes: int) -> int | None:
        """Where a line through traced sizes reaches the budget; None if it does nowhere.

        Through the one nearest to a size, and another at some distance: reserved memory grows in
        steps.
        """
        here = min(self.traced_sizes, key=lambda size: abs(size - near))
        others = [size for size in self.traced_sizes if abs(size - here) > here // _FAR_DIVISOR]
        if not others:
            return None
        there = min(others, key=lambda size: abs(size - here))
        slope = (self.peak_bytes(there) - self.peak_bytes(here)) / (there - here)
        return None if slope <= 0 else int(here + (budget_bytes - self.peak_bytes(here)) / slope)

    def _traced(self, batch_size: int) -> BatchTrace:
        return self._traces[batch_size] or self.trace

    def _outcome(self, trace: BatchTrace, batch_size: int, capacity_bytes: int | None) -> Outcome:
        if not self.is_traceable(batch_size):
            return _UNTRACED
        return super()._outcome(self._traced(batch_size), batch_size, capacity_bytes)
