"""growth_of(): whether traced repetitions are alike and grow on straight lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from memcallback.core.allocation_trace import Alloc, Free
from memcallback.core.kernel import KernelCall
from memcallback.trace.growth import NUM_COMPARED, NUM_MORE, Growth
from memcallback.trace.items import is_same, item_text
from memcallback.trace.marks import Repeated
from memcallback.trace.traced_step import Item, TracedStep

#: Events of repetitions that were not traced, at most: as many as are replayed in seconds.
_MAX_EVENTS = 1_000_000


class Irregular(ValueError):
    """Repetitions differ in more than sizes on straight lines; the text says where."""


def grown(traced: TracedStep, parts: Sequence[Repeated], cuts: Sequence[int]) -> TracedStep:
    """A trace with the repetitions that were not traced; `Irregular` if they do not repeat."""
    indices = {position: index for index, position in enumerate(traced.positions)}
    growths = [
        growth_of(traced, [indices[cuts[cut]] for cut in part.cuts], part.num_all, part.period)
        for part in parts
        if part.num_all > len(part.cuts) - 1
    ]
    caveats = [*traced.caveats]
    for number, growth in enumerate(growths):
        num_events = growth.starts[-1] - growth.starts[-1 - growth.period]
        most = max(NUM_COMPARED, _MAX_EVENTS // (len(growths) * num_events))
        growths[number] = thin = growth.thinned(most)
        if thin is not growth:
            caveats.append(
                f"The step runs {thin.num_all:,} batches or tokens one after another. To save "
                f"time, only {thin.num_written:,} of them were replayed in the allocator, the last "
                "ones among them."
            )
    return replace(traced, growths=tuple(growths), caveats=tuple(dict.fromkeys(caveats)))


def growth_of(traced: TracedStep, starts: Sequence[int], num_all: int, period: int) -> Growth:
    """The growth of repetitions that start at these items; `Irregular` if they do not repeat."""
    blocks = [traced.items[start:stop] for start, stop in pairwise(starts)]
    growth = Growth.of(
        tuple(starts),
        num_all,
        period,
        ids=tuple(tuple(_allocated(block)) for block in blocks),
        freed=frozenset(
            item.id for item in traced.items[starts[0] : starts[-1]] if isinstance(item, Free)
        ),
    )
    for back in range(1 + NUM_MORE if period == 1 else period):
        _check(traced, growth, blocks, len(blocks) - 1 - back)
    return growth


def _check(traced: TracedStep, growth: Growth, blocks: Sequence[Sequence[Item]], last: int) -> None:
    """Check a repetition against those one and two periods before."""
    compared = [last - number * growth.period for number in range(NUM_COMPARED)]
    for block in compared[1:]:
        ours, theirs = blocks[last], blocks[block]
        for place in range(max(len(ours), len(theirs))):
            if (
                place >= min(len(ours), len(theirs))
                or not is_same(_plain(ours[place]), _moved(theirs[place], growth, last - block))
                or _frees_what_was_before(ours[place], growth)
            ):
                raise _differs(traced, growth, (last, block), place)
    first = [traced.first_numbers[growth.starts[block]] for block in compared]
    numbers, loose = traced.numbers, traced.loose
    for place in range(traced.first_numbers[growth.starts[last + 1]] - first[0]):
        newest, middle, oldest = (numbers[start + place] for start in first)
        if newest - middle != middle - oldest and first[0] + place not in loose:
            raise Irregular(f"a size is {oldest}, then {middle}, then {newest}")


def _frees_what_was_before(item: Item, growth: Growth) -> bool:
    return isinstance(item, Free) and not growth.has(item.id)


def _differs(traced: TracedStep, growth: Growth, blocks: tuple[int, int], place: int) -> Irregular:
    ours, theirs = (
        f"repetition {block + 1} has {item_text(traced, growth.starts[block] + place)}"
        for block in blocks
    )
    return Irregular(f"{ours} where {theirs}")


def _plain(item: Item) -> Item:
    """An item without its category: what the last repetition leaves is an activation."""
    return item._replace(category=None) if isinstance(item, Alloc) else item


def _moved(item: Item, growth: Growth, lag: int) -> Item:
    """A plain item with the ids that its like has so many repetitions later."""
    if isinstance(item, Alloc):
        return item._replace(id=growth.moved(item.id, lag), category=None)
    if isinstance(item, Free):
        return Free(growth.moved(item.id, lag))
    if isinstance(item, KernelCall):
        return replace(
            item,
            outputs=tuple(
                None if number is None else growth.moved(number, lag) for number in item.outputs
            ),
            handles=tuple(growth.moved(number, lag) for number in item.handles),
        )
    return item


def _allocated(block: Sequence[Item]) -> list[int]:
    ids: list[int] = []
    for item in block:
        if isinstance(item, Alloc):
            ids.append(item.id)
        elif isinstance(item, KernelCall):
            ids += item.kept
    return ids
