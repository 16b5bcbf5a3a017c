"""Searches for the largest batch size, by replays of a trace at other batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memcallback.core.step_memory import largest
from memcallback.devices.catalogue import Device
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.replay import replay_on

#: No search goes beyond this batch size.
_MAX_BATCH_SIZE = 1 << 31
#: The first stride of `largest_number` is its starting point divided by this.
_STRIDE_DIVISOR = 128
#: How many straight lines `crossing` draws.
_NUM_LINES = 3


def largest_number(holds: Callable[[int], bool], *, near: int, end: int) -> int | None:
    """The largest n for which `holds(n)`; None if it still holds at `end`.

    It holds for the result and not for the next number. Numbers far from both are not all tried;
    none is tried twice.
    """
    stride = max(1, near // _STRIDE_DIVISOR)
    if holds(near):
        good, bad = near, near + stride
        while holds(bad):
            good, stride = bad, 2 * stride
            bad = good + stride
            if good >= end:
                return None
    else:
        good, bad = max(0, near - stride), near
        while good and not holds(good):
            bad, stride = good, 2 * stride
            good = max(0, bad - stride)
    while bad - good > 1:
        middle = (good + bad) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good


def crossing(value: Callable[[int], int], bound: int, *, first: int, second: int, end: int) -> int:
    """Roughly where a growing value reaches a bound, by straight lines through known points."""
    here, there = first, second
    here_value, there_value = value(here), value(there)
    for number in range(_NUM_LINES):
        if there_value == here_value:
            break
        slope_bytes, slope_samples = there_value - here_value, there - here
        guess = min(max(1, there + (bound - there_value) * slope_samples // slope_bytes), end)
        if guess in (here, there):
            return guess
        here, here_value, there = there, there_value, guess
        if number < _NUM_LINES - 1:
            there_value = value(there)
    return there


class _Outcome(NamedTuple):
    """What one replay showed; peaks are the largest of all phases of all steps."""

    is_out_of_memory: bool
    num_alloc_retries: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None


class BatchReplays:
    """Replays a step at any batch size on one device, each size once."""

    def __init__(self, trace: BatchTrace, device: Device, settings: AllocatorSettings) -> None:
        self.trace = trace
        self.device = device
        self.settings = settings
        #: By batch size and the allocator's capacity.
        self._outcomes: dict[tuple[int, int | None], _Outcome] = {}

    def on(self, device: Device) -> BatchReplays:
        """The same on a device of another size; replays of either serve both."""
        other = BatchReplays(self.trace, device, self.settings)
        other._outcomes = self._outcomes
        return other

    def fits(self, batch_size: int) -> bool:
        """Whether the allocator does not run out of memory."""
        return not self._on_device(batch_size).is_out_of_memory

    def fits_without_retry(self, batch_size: int) -> bool:
        """Whether the allocator never frees its cache to make room."""
        outcome = self._on_device(batch_size)
        return not outcome.is_out_of_memory and outcome.num_alloc_retries == 0

    def peak_bytes(self, batch_size: int) -> int:
        """The peak of all steps: reserved (on a CPU allocated); unlimited if out of memory."""
        outcome = self._on_device(batch_size)
        if outcome.is_out_of_memory:
            outcome = self._replay(batch_size, None)
        reserved = outcome.peak_reserved_bytes
        return outcome.peak_allocated_bytes if reserved is None else reserved

    def largest(
        self, holds: Callable[[int], bool], *, start: int, by_allocated: bool = False
    ) -> int | None:
        """The largest batch size for which `holds(batch_size)`; 0 if it fails for one sample.

        None if the trace knows only its own batch size, or it always holds. It holds for the result
        and not for the next size, but sizes far from both are not tried: reserved memory can be
        larger for a few samples less, depending on how blocks fit into each other. If something
        shrinks with the batch size (a queue of fixed length), larger sizes are not known.

        The search begins about where the unlimited reserved peak reaches the device's capacity;
        with `by_allocated` where the allocated peak does, beyond which nothing fits.
        """
        if not self.trace.grows:
            return None
        last = self.trace.largest_known
        return largest_number(
            lambda batch_size: (last is None or batch_size <= last) and holds(batch_size),
            near=self._near_capacity(start, by_allocated),
            end=_MAX_BATCH_SIZE,
        )

    def limit(self, start: int) -> int | None:
        """The largest batch size that fits, searched from `start`; None also without a capacity."""
        if self.device.capacity_bytes is None:
            return None
        return self.largest(self.fits, start=start, by_allocated=True)

    def limit_without_retry(self, start: int) -> int | None:
        """The largest batch size that fits without a retry; as `limit`."""
        if self.device.capacity_bytes is None:
            return None
        return self.largest(self.fits_without_retry, start=start)

    def _near_capacity(self, start: int, by_allocated: bool) -> int:
        capacity_bytes = self.device.allocator_capacity_bytes
        end = self.trace.largest_known or _MAX_BATCH_SIZE
        if capacity_bytes is None or end < 2 * start:
            return start

        def unlimited_peak(batch_size: int) -> int:
            outcome = self._replay(batch_size, None)
            reserved = outcome.peak_reserved_bytes
            return outcome.peak_allocated_bytes if by_allocated or reserved is None else reserved

        return crossing(unlimited_peak, capacity_bytes, first=start, second=2 * start, end=end)

    def _on_device(self, batch_size: int) -> _Outcome:
        return self._replay(batch_size, self.device.allocator_capacity_bytes)

    def _replay(self, batch_size: int, capacity_bytes: int | None) -> _Outcome:
        key = batch_size, capacity_bytes
        if key not in self._outcomes:
            replay = replay_on(
                self.trace.at(batch_size).events, self.device, self.settings, capacity_bytes
            )
            windows = [window for step in replay.steps for window in step.windows]
            self._outcomes[key] = _Outcome(
                is_out_of_memory=replay.out_of_memory is not None,
                num_alloc_retries=replay.num_alloc_retries,
                peak_allocated_bytes=largest(w.peak_allocated_bytes for w in windows) or 0,
                peak_reserved_bytes=largest(w.peak_reserved_bytes for w in windows),
            )
        return self._outcomes[key]
