"""The items of traced steps: which are alike, and what each is in words."""

from __future__ import annotations

from collections.abc import Sequence

from memcallback.core.allocation_trace import (
    Alloc,
    EmptyCache,
    Event,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.kernel import KernelCall
from memcallback.trace.traced_step import Item, TracedStep


def is_same(item: Item, other: Item) -> bool:
    """Whether two items differ in sizes alone."""
    if isinstance(item, Alloc) and isinstance(other, Alloc):
        return item.id == other.id and item[2:] == other[2:]
    if isinstance(item, KernelCall) and isinstance(other, KernelCall):
        ours, theirs = item.rule, other.rule
        return (
            (item.outputs, item.handles, item.operator, item.module)
            == (other.outputs, other.handles, other.operator, other.module)
            and (ours.function, ours.constants) == (theirs.function, theirs.constants)
            and len(ours.numbers) == len(theirs.numbers)
        )
    return item == other


def item_of(step: TracedStep, position: int) -> int:
    """The index of the item that the number at a position belongs to."""
    for index, item in enumerate(step.items):
        if isinstance(item, Alloc):
            position -= 1
        elif isinstance(item, KernelCall):
            position -= len(item.kept) + len(item.rule.numbers)
        if position < 0:
            return index
    raise AssertionError("the items have fewer numbers")


def item_text(step: TracedStep, index: int) -> str:
    """Describe an item and where it is."""
    if index >= len(step.items):
        return "nothing"
    item = step.items[index]
    if isinstance(item, KernelCall):
        return f"a call of {item.operator}{_of_module(item.module)}"
    # The allocs come first, so that a free finds the one that it ends.
    allocs = [event for event in step.trace.events if isinstance(event, Alloc)]
    events = [event for event in step.items[: index + 1] if not isinstance(event, KernelCall)]
    return event_text([*allocs, *events], -1)


def event_text(events: Sequence[Event], position: int) -> str:
    """Describe an event and where it is."""
    if position >= len(events):
        return "nothing"
    event = events[position]
    if not isinstance(event, (Alloc, Free)):
        return _mark_text(event)
    alloc = next(each for each in events if isinstance(each, Alloc) and each.id == event.id)
    marks = (mark for mark in events[:position][::-1] if isinstance(mark, (PhaseStart, PhaseEnd)))
    mark = next(marks, None)
    phase = f" ({mark.phase.label})" if isinstance(mark, PhaseStart) else ""
    where = f"{alloc.operator or 'an allocation'}{_of_module(alloc.module)}{phase}"
    if isinstance(event, Alloc):
        return f"{where} with {event.size_bytes} bytes"
    return f"the freeing of {where}"


def _mark_text(mark: EmptyCache | PhaseStart | PhaseEnd | StepStart | StepEnd) -> str:
    if isinstance(mark, EmptyCache):
        return "the release of the allocator's free segments"
    end = "start" if isinstance(mark, (PhaseStart, StepStart)) else "end"
    if isinstance(mark, (StepStart, StepEnd)):
        return f"the {end} of a step"
    return f"the {end} of phase {mark.phase.label!r}"


def _of_module(module: str) -> str:
    return f" in module {module!r}" if module else " in the root module"
