"""timeline_of(): the memory of a predicted step from allocation to allocation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memcallback.core.allocation_trace import (
    Alloc,
    Event,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    last_step_start,
)
from memcallback.core.kernel import AllocationSource
from memcallback.core.types import Category, Phase
from memcallback.devices.catalogue import Device, HostSpec
from memcallback.page.timeline import Moment, Timeline
from memcallback.prediction.allocator.at_start import Segment, placed
from memcallback.prediction.allocator.blocks import Block
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.allocator.host import HostAllocator
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.replay import replay

#: Columns of the picture: about as many as a screen has pixels for it.
_NUM_COLUMNS = 1100
_CATEGORIES = list(Category)

OriginOf = Callable[[Alloc], AllocationSource | None]
#: The line of the program for an allocation that no module makes; empty if unknown.
PlaceOf = Callable[[Alloc], str]


def timeline_of(
    events: Sequence[Event],
    device: Device,
    settings: AllocatorSettings,
    origin_of: OriginOf,
    place_of: PlaceOf,
    *,
    is_unlimited: bool,
    at_start: Sequence[Segment] = (),
    measured: Mapping[Phase, int] | None = None,
) -> Timeline:
    """The last step of a trace, replayed once more."""
    replayed = _replayed(events, device, settings, at_start, is_unlimited=is_unlimited)
    changes = list(_changes(events, replayed))
    columns = [
        (phase, _column(start, len(changes)), _column(stop, len(changes)))
        for phase, start, stop in _phases(events)
    ]
    return Timeline(
        moments=[_moment(change, origin_of, place_of) for change in _columns(changes)],
        phases=[one for one in columns if one[2] > one[1]],
        num_allocations=sum(change.alloc is not None for change in changes),
        capacity_bytes=device.allocator_capacity_bytes,
        measured=measured or {},
    )


@dataclass(frozen=True)
class _Replayed:
    """Block bytes of each allocation, and reserved bytes after each of the last step."""

    block_bytes: Mapping[int, int]
    reserved_bytes: Sequence[int]


class _Watched(CachingAllocator):
    """Notes what is reserved after each allocation."""

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int | None) -> None:
        super().__init__(settings, capacity_bytes=capacity_bytes)
        self.history: list[int] = []

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        block = super().allocate(size_bytes, stream)
        self.history.append(self.reserved_bytes)
        return block


def _replayed(
    events: Sequence[Event],
    device: Device,
    settings: AllocatorSettings,
    at_start: Sequence[Segment],
    *,
    is_unlimited: bool,
) -> _Replayed:
    if isinstance(device, HostSpec):
        return _Replayed(replay(events, HostAllocator(), unlimited=True).block_bytes, ())
    capacity_bytes = None if is_unlimited else device.allocator_capacity_bytes
    allocator = _Watched(settings, capacity_bytes)
    known = allocator.adopt(placed(at_start, events))
    replayed = replay(events, allocator, unlimited=is_unlimited, known=known)
    # The last step is replayed last, however often it was repeated.
    start = last_step_start(events)
    sizes = replayed.block_bytes
    num_last = sum(
        isinstance(event, Alloc) and sizes.get(event.id, 0) > 0 and event.id not in known
        for event in events[start:]
    )
    return _Replayed(replayed.block_bytes, allocator.history[-num_last:] if num_last else ())


@dataclass(frozen=True)
class _Change:
    """Memory after an allocation or a free of the last step."""

    by_category: tuple[int, ...]
    reserved_bytes: int | None
    alloc: Alloc | None
    block_bytes: int


def _changes(events: Sequence[Event], replayed: _Replayed) -> Iterator[_Change]:
    sizes = [0] * len(_CATEGORIES)
    positions = {category: number for number, category in enumerate(_CATEGORIES)}
    alive: dict[int, int] = {}
    reserved = iter(replayed.reserved_bytes)
    now: int | None = next(iter(replayed.reserved_bytes), None)
    start = last_step_start(events)
    for number, event in enumerate(events):
        if isinstance(event, StepEnd) and number >= start:
            return
        if isinstance(event, Alloc) and event.size_bytes:
            position = alive[event.id] = positions[event.category or Category.TEMPORARY]
            size_bytes = replayed.block_bytes[event.id]
            sizes[position] += size_bytes
            if number >= start:
                now = next(reserved, None) if size_bytes else now
                yield _Change(tuple(sizes), now, event, size_bytes)
        elif isinstance(event, Free) and event.id in alive:
            sizes[alive.pop(event.id)] -= replayed.block_bytes[event.id]
            if number >= start:
                yield _Change(tuple(sizes), now, None, 0)


def _phases(events: Sequence[Event]) -> Iterator[tuple[Phase, int, int]]:
    """Each phase of the last step, with its first change and the one after its last."""
    sizes = {event.id: event.size_bytes for event in events if isinstance(event, Alloc)}
    count, begins = 0, 0
    for event in events[last_step_start(events) :]:
        if isinstance(event, (Alloc, Free)):
            count += sizes[event.id] > 0
        elif isinstance(event, PhaseStart):
            begins = count
        elif isinstance(event, PhaseEnd):
            yield event.phase, begins, count


def _column(position: int, num_changes: int) -> int:
    return min(num_changes, _NUM_COLUMNS) * position // max(1, num_changes)


def _columns(changes: Sequence[_Change]) -> Iterator[_Change]:
    """Of the changes that share a column the one with most memory."""
    columns: dict[int, _Change] = {}
    for position, change in enumerate(changes):
        column = _column(position, len(changes))
        shown = columns.get(column)
        if shown is None or sum(change.by_category) > sum(shown.by_category):
            columns[column] = change
    yield from columns.values()


def _moment(change: _Change, origin_of: OriginOf, place_of: PlaceOf) -> Moment:
    alloc = change.alloc
    if alloc is None:
        return Moment(
            by_category=change.by_category,
            reserved_bytes=change.reserved_bytes,
            size_bytes=0,
            what="a tensor is freed",
            where="",
        )
    origin = origin_of(alloc)
    line = origin and (origin.own_line or origin.line)
    places = [f"in {alloc.module}" if alloc.module else "", f"at {line}" if line else ""]
    if not any(places) and (place := place_of(alloc)):
        # In the backward pass no line of the program runs: that of the forward pass is named.
        places = [f"in {place}"]
    return Moment(
        by_category=change.by_category,
        reserved_bytes=change.reserved_bytes,
        size_bytes=change.block_bytes,
        what=(alloc.operator or "an operator").removeprefix("aten::"),
        where=" ".join(filter(None, places)),
    )
