"""Searches for the largest batch size, by replays of a trace at other batch sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from memcallback.core.step_memory import largest
from memcallback.core.units import format_bytes
from memcallback.core.validation import DEFAULT_HEADROOM, MAX_BATCH_SIZE
from memcallback.devices.catalogue import Device
from memcallback.isolation.child import is_in_child
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.asking_apart import asking_apart
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.replay import replay_on
from memcallback.prediction.replayed import Replay

#: The first stride of `largest_number` is its starting point divided by this.
_STRIDE_DIVISOR = 128
#: How many sizes below the largest that fits are tried too.
_NUM_BELOW = 8
#: A result is confirmed to within this share of itself.
_CONFIRMED_DIVISOR = 128
#: It is confirmed with as many tokens of a generation as have so many events, some seconds' work.
CONFIRMED_ITEMS = 500_000
#: A batch that needs less than 1/16 of the capacity is taken so many times larger: small batches
#: fill the same segments, and a straight line through them leads nowhere.
_FAR = 16
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


def largest_up_to(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `most` for which `holds(n)`; 0 if none is found."""
    if most < 1:
        return 0
    return largest_number(lambda n: n <= most and holds(n), near=most, end=most + 1) or 0


def crossing(
    value: Callable[[int], int],
    bound: int,
    *,
    first: int,
    second: int,
    end: int,
    least: int = 1,
) -> int:
    """Roughly where a growing value reaches a bound, by straight lines through known points."""
    here, there = first, second
    here_value, there_value = value(here), value(there)
    for number in range(_NUM_LINES):
        if there_value == here_value:
            break
        slope_bytes, slope_samples = there_value - here_value, there - here
        guess = min(max(least, there + (bound - there_value) * slope_samples // slope_bytes), end)
        if guess in (here, there):
            return guess
        here, here_value, there = there, there_value, guess
        if number < _NUM_LINES - 1:
            there_value = value(there)
    return there


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest batch sizes that fit, all but one with nothing kept free.

    Attributes:
        at_all: The largest that fits; no smaller one is known to fail. 0 if none does; None if
            unknown or unlimited.
        without_retry: The largest up to `at_all` for which the allocator never frees its cache to
            make room.
        fits_again: A larger size known to fit, though the one after `at_all` does not: blocks fit
            into each other differently at each size. None if there is none.
        with_headroom: The largest up to `without_retry` with `DEFAULT_HEADROOM` of the device kept
            free.
    """

    at_all: int | None
    without_retry: int | None
    fits_again: int | None = None
    with_headroom: int | None = None


def gap_sentence(limit: int, fits_again: int) -> str:
    """That a size fits though a smaller one does not."""
    return (
        f"{limit + 1:,} samples do not fit, but {fits_again:,} do: at some batch sizes, "
        "blocks fill the gaps in the allocator's memory better than at others."
    )


def budget(
    capacity_bytes: int,
    headroom: float,
    outside_bytes: int | None,
    most_outside_bytes: int | None = None,
) -> int:
    """What the allocator may take: the capacity less the headroom and what others use.

    The most that others may use stays free, too, where what they use is assumed. The headroom is a
    part of it: it is there for what is not known.
    """
    left_bytes = int(capacity_bytes * (1 - headroom)) - (outside_bytes or 0)
    if most_outside_bytes is None:
        return left_bytes
    return min(left_bytes, capacity_bytes - most_outside_bytes)


def kept_free(
    capacity_bytes: int,
    headroom: float,
    outside_bytes: int | None,
    most_outside_bytes: int | None = None,
) -> str:
    """What `budget` keeps free, in words: the headroom, or the most that others may use."""
    if most_outside_bytes is not None:
        with_it = budget(capacity_bytes, headroom, outside_bytes, most_outside_bytes)
        if with_it < budget(capacity_bytes, headroom, outside_bytes):
            return format_bytes(most_outside_bytes)
    return f"{100 * headroom:g} %"


class Outcome(NamedTuple):
    """What one replay showed; peaks are the largest of all phases of all steps."""

    is_out_of_memory: bool
    num_alloc_retries: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None


class BatchReplays:
    """Replays a step at any batch size on one device, each size once.

    Of the tokens of a generation it replays some, the last ones among them, and for the results of
    a search all of them, or as many as `CONFIRMED_ITEMS` allows. A cache that grows leaves behind
    the blocks that it grew out of: with fewer tokens fewer of them, so estimates are too low.
    """

    def __init__(self, trace: BatchTrace, device: Device, settings: AllocatorSettings) -> None:
        self.trace = trace
        self.device = device
        self.settings = settings
        self._thin, self._whole = trace.thinned(), trace.thinned(CONFIRMED_ITEMS)
        self._is_estimated = self._thin is not trace
        #: By batch size and the allocator's capacity.
        self._outcomes: dict[tuple[int, int | None], Outcome] = {}
        #: Of them, those that are no estimates.
        self._sure: set[tuple[int, int | None]] = set()

    def on(self, device: Device) -> BatchReplays:
        """The same on a device of another size; replays of either serve both."""
        other = BatchReplays(self.trace, device, self.settings)
        other._outcomes, other._sure = self._outcomes, self._sure
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
        self,
        holds: Callable[[int], bool],
        *,
        start: int,
        by_allocated: bool = False,
        within_bytes: int | None = None,
    ) -> int | None:
        """The largest batch size for which `holds(batch_size)`; 0 if it fails for one sample.

        None if the trace knows only its own batch size, or it always holds. Reserved memory can be
        larger for a few samples less, depending on how blocks fit into each other. So the eight
        sizes below the result are tried too: it is below the first of them that fails, and below
        each size that is known to run out of memory. Sizes far below are not tried. A result that
        an estimate gives is confirmed; if it fails, the largest below it is found to within 1 %.
        If something shrinks with the batch size (a queue of fixed length), larger sizes are not
        known; if something has some samples less than the batch, smaller ones are not.

        The search begins about where the unlimited reserved peak reaches `within_bytes`, by default
        the device's capacity; with `by_allocated` where the allocated peak does, beyond which
        nothing fits.
        """
        if not self.trace.grows:
            return None
        holds = self._where_known(holds)
        near = self._near(start, by_allocated, within_bytes)
        found = largest_number(holds, near=near, end=MAX_BATCH_SIZE)
        if found is None:
            return None
        return self._largest_confirmed(self._below_failures(found, holds), holds)

    def _where_known(self, holds: Callable[[int], bool]) -> Callable[[int], bool]:
        return lambda batch_size: self.trace.is_in_range(batch_size) and holds(batch_size)

    def _largest_confirmed(self, found: int, holds: Callable[[int], bool]) -> int:
        """The largest size up to one found by estimates that holds with all tokens."""
        if not self._is_estimated or not found or self._holds_confirmed(found, holds):
            return found
        known = [size for size in self._tried_here() if self._is_sure(size) and size <= found]
        good = max((size for size in known if holds(size)), default=0)
        bad = min(size for size in known if size > good)
        # Each takes a second or more: the last steps of a whole search would gain less than 1 %.
        while bad - good > max(1, bad // _CONFIRMED_DIVISOR):
            middle = (good + bad) // 2
            if self._holds_confirmed(middle, holds):
                good = middle
            else:
                bad = middle
        return good

    def largest_up_to(self, most: int, holds: Callable[[int], bool]) -> int:
        """The largest batch size up to one for which `holds(batch_size)`; 0 if none is found."""
        holds = self._where_known(holds)
        return self._largest_confirmed(largest_up_to(most, holds), holds)

    def _holds_confirmed(self, batch_size: int, holds: Callable[[int], bool]) -> bool:
        if self.trace.is_in_range(batch_size) and not self._is_sure(batch_size):
            capacity_bytes = self.device.allocator_capacity_bytes
            key = batch_size, capacity_bytes
            self._outcomes[key] = self._outcome(self._whole, batch_size, capacity_bytes)
            self._sure.add(key)
        return holds(batch_size)

    def _is_sure(self, batch_size: int) -> bool:
        """Whether the outcome on this device is none of an estimate."""
        key = batch_size, self.device.allocator_capacity_bytes
        return not self._is_estimated or key in self._sure

    def _below_failures(self, found: int, holds: Callable[[int], bool]) -> int:
        """The largest size up to the one found that is below each size known to fail."""
        below = range(found - 1, max(0, found - 1 - _NUM_BELOW), -1)
        failing = [size for size in below if self.trace.is_in_range(size) and not holds(size)]
        failing += [size for size in self._tried_here() if size <= found and not self.fits(size)]
        if not failing:
            return found
        return largest_up_to(min(failing) - 1, holds)

    def limits(self, start: int) -> Limits:
        """The largest batch sizes that fit, searched from `start`; None also without a capacity."""
        if self.device.capacity_bytes is None:
            return Limits(at_all=None, without_retry=None)
        without_retry = self.largest(self.fits_without_retry, start=start)
        # This search knows the sizes that ran out of memory in the other.
        at_all = self.largest_at_all(start)
        if at_all is None or without_retry is None:
            return Limits(at_all=at_all, without_retry=without_retry)
        fitting = max(
            (size for size in self._tried_here() if self._is_sure(size) and self.fits(size)),
            default=0,
        )
        return Limits(
            at_all=at_all,
            without_retry=without_retry
            if without_retry <= at_all
            else self.largest_up_to(at_all, self.fits_without_retry),
            fits_again=fitting if fitting > at_all else None,
        )

    def largest_at_all(self, start: int) -> int | None:
        """The largest batch size that fits, perhaps with retries, searched from `start`."""
        return self.largest(self.fits, start=start, by_allocated=True)

    def largest_with_headroom(self, start: int, at_all: int | None) -> int | None:
        """The largest batch size up to a limit with `DEFAULT_HEADROOM` of the device kept free."""
        capacity_bytes = self.device.capacity_bytes
        if capacity_bytes is None or at_all is None:
            return None
        device = self.device
        budget_bytes = budget(
            capacity_bytes, DEFAULT_HEADROOM, device.outside_bytes, device.most_outside_bytes
        )

        def fits(batch_size: int) -> bool:
            return (
                self.fits_without_retry(batch_size) and self.peak_bytes(batch_size) <= budget_bytes
            )

        found = self.largest(fits, start=start, within_bytes=budget_bytes)
        return found if found is None or found <= at_all else self.largest_up_to(at_all, fits)

    def _tried_here(self) -> list[int]:
        """The batch sizes that were replayed on this device."""
        capacity_bytes = self.device.allocator_capacity_bytes
        return [size for size, capacity in self._outcomes if capacity == capacity_bytes]

    def _near(self, start: int, by_allocated: bool, within_bytes: int | None) -> int:
        """About where the unlimited peak reaches a number of bytes, or the capacity."""
        capacity_bytes = self.device.allocator_capacity_bytes
        end = self.trace.largest_known or MAX_BATCH_SIZE
        if capacity_bytes is not None and self.trace.curvatures is not None:
            # Two points of a parabola lead far beyond it, where a replay may take for ever.
            end = min(end, self.trace.largest_within(capacity_bytes) or end)
        if capacity_bytes is None or end < 2 * start:
            return start

        def unlimited_peak(batch_size: int) -> int:
            outcome = self._replay(batch_size, None)
            reserved = outcome.peak_reserved_bytes
            return outcome.peak_allocated_bytes if by_allocated or reserved is None else reserved

        first, second = start, 2 * start
        while second * _FAR <= end and unlimited_peak(second) * _FAR < capacity_bytes:
            first, second = second, second * _FAR
        least = self.trace.smallest_known
        bound_bytes = capacity_bytes if within_bytes is None else within_bytes
        return crossing(
            unlimited_peak, bound_bytes, first=first, second=second, end=end, least=least
        )

    def _on_device(self, batch_size: int) -> Outcome:
        return self._replay(batch_size, self.device.allocator_capacity_bytes)

    def _replay(self, batch_size: int, capacity_bytes: int | None) -> Outcome:
        key = batch_size, capacity_bytes
        if key not in self._outcomes:
            self._outcomes[key] = self._outcome(self._thin, batch_size, capacity_bytes)
        return self._outcomes[key]

    def _outcome(self, trace: BatchTrace, batch_size: int, capacity_bytes: int | None) -> Outcome:
        def replayed() -> Replay:
            events = trace.at(batch_size).events
            return replay_on(events, self.device, self.settings, capacity_bytes)

        with _without_collector():
            replay = asking_apart(replayed)
        windows = [window for step in replay.steps for window in step.windows]
        return Outcome(
            is_out_of_memory=replay.out_of_memory is not None,
            num_alloc_retries=replay.num_alloc_retries,
            peak_allocated_bytes=largest(w.peak_allocated_bytes for w in windows) or 0,
            peak_reserved_bytes=largest(w.peak_reserved_bytes for w in windows),
        )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let Python's garbage collector rest in a child, which a replay gives nothing to collect.

    It would walk through all objects of the trace again and again.
    """
    if not is_in_child() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
