"""The largest batch size for which a predicate holds."""

from __future__ import annotations

from collections.abc import Callable

#: The first stride of a search, in parts of where it begins.
_PARTS = 128
#: Straight lines that are drawn to come near a bound.
_NUM_LINES = 3


def largest(holds: Callable[[int], bool], *, near: int, end: int) -> int | None:
    """The largest number of which something holds.

    It holds for the number found and not for the next one; of numbers far from both not all are
    tried, and none twice.
    """
    stride = max(1, near // _PARTS)
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


def crossing(figure: Callable[[int], int], bound: int, *, first: int, second: int, end: int) -> int:
    """About the number at which a growing figure reaches a bound, by straight lines through what is
    known of it.
    """
    here, there = first, second
    here_is, there_is = figure(here), figure(there)
    for number in range(_NUM_LINES):
        if there_is == here_is:
            break
        next_one = min(
            max(1, there + (bound - there_is) * (there - here) // (there_is - here_is)), end
        )
        if next_one in (here, there):
            return next_one
        here, here_is, there = there, there_is, next_one
        if number < _NUM_LINES - 1:
            there_is = figure(there)
    return there
