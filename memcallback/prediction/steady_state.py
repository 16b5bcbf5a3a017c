"""Repeat the last optimizer window until the allocator settles.

A window is the steps up to and including one optimizer update; in a trace without updates each step
is one. Training repeats its requests from the second window on. The allocator may need some more
windows to settle: it serves the requests from other free blocks, and a block can be larger than
requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from memcallback.core.allocation_trace import Alloc, Event, Free, PhaseEnd, StepEnd, StepStart
from memcallback.core.types import Phase, Stage
from memcallback.core.units import format_bytes

#: The most windows that are replayed with batches of one size, including those of the trace. Of 135
#: configurations trained for six updates, 44 had the same values to the byte from the second update
#: on, 80 from the third, 8 from the fourth or fifth; in 3, two or three arrangements alternate
#: forever (benchmarks/results/README.md lists them).
MAX_WINDOWS = 6
#: The allocated and the reserved peak, in bytes.
Peaks = tuple[int, int]


class Window(NamedTuple):
    """The last window of a trace.

    Attributes:
        start: The position of its first event, right after the step that ends the window before.
        stop: The position after its last event.
        number: Its number among the windows of its stage, from 1 on.
        num_alike: How many windows there are since the last batch of another size.
        stage: What its steps are steps of.
    """

    start: int
    stop: int
    number: int
    num_alike: int
    stage: Stage = Stage.TRAINING


def last_windows(events: Sequence[Event]) -> list[Window]:
    """The last window of each run of steps of one stage, such as a training and a validation.

    A run without another window before it, or whose last step ends no window, has none.
    """
    marks = [
        (position, event)
        for position, event in enumerate(events)
        if type(event) is not Alloc and type(event) is not Free
    ]
    windows: list[Window] = []
    for _, run in groupby(_steps(marks), lambda step: step.stage):
        steps = list(run)
        has_updates = any(step.has_update for step in steps)
        ends: list[int] = []
        num_alike = 0
        is_whole = is_other = False
        for step in steps:
            is_whole |= step.has_update
            is_other |= step.has_other_batch
            if is_whole or not has_updates:
                ends.append(step.stop)
                num_alike = 0 if is_other else num_alike + 1
                is_whole = is_other = False
        if len(ends) > 1 and ends[-1] == steps[-1].stop:
            windows.append(Window(ends[-2], ends[-1], len(ends), num_alike, steps[0].stage))
    return windows


class _Step(NamedTuple):
    stage: Stage
    stop: int
    has_update: bool
    has_other_batch: bool


def _steps(marks: Iterable[tuple[int, Event]]) -> Iterator[_Step]:
    stage, has_update, has_other_batch = Stage.TRAINING, False, False
    for position, event in marks:
        if isinstance(event, StepStart):
            stage, has_other_batch = event.stage, event.batch_size is not None
        elif isinstance(event, PhaseEnd):
            has_update |= event.phase is Phase.OPTIMIZER_STEP
        elif isinstance(event, StepEnd):
            yield _Step(stage, position + 1, has_update, has_other_batch)
            has_update = False


def pairs_of(freed: Sequence[Alloc], left: Sequence[Alloc]) -> list[tuple[int, int]] | None:
    """Match what a window frees to what it leaves, by id; None if they are of different kinds."""
    ours, theirs = _by_kind(freed), _by_kind(left)
    return (
        [(number, theirs[kind]) for kind, number in ours.items()]
        if ours.keys() == theirs.keys()
        else None
    )


def _by_kind(storages: Sequence[Alloc]) -> dict[Hashable, int]:
    """The kind of each allocation and its index within that kind -> its id."""
    counts: Counter[Hashable] = Counter()
    ids: dict[Hashable, int] = {}
    for alloc in storages:
        kind = (alloc.size_bytes, alloc.stream, alloc.category, alloc.operator, alloc.module)
        ids[kind, counts[kind]] = alloc.id
        counts[kind] += 1
    return ids


def growth(window: Window, freed: Sequence[Alloc], left: Sequence[Alloc]) -> tuple[str, ...]:
    """The caveat of a window that frees fewer or more bytes than it leaves; else none."""
    freed_bytes, left_bytes = (
        sum(alloc.size_bytes for alloc in storages) for storages in (freed, left)
    )
    if freed_bytes == left_bytes:
        return ()
    frees = (
        f"frees {format_bytes(freed_bytes)} that was allocated before it, and keeps "
        f"{format_bytes(left_bytes)} that it allocated itself"
    )
    if window.stage is not Stage.TRAINING:
        change = f"grows by {format_bytes(left_bytes - freed_bytes)} with each batch"
        if left_bytes < freed_bytes:
            change = (
                f"falls by {format_bytes(freed_bytes - left_bytes)} from batch {window.number - 1} "
                f"to batch {window.number}"
            )
        return (
            f"Memory {change} (batch {window.number} {frees}). The values are those of batch "
            f"{window.number}; num_batches chooses another.",
        )
    return (
        f"Update {window.number} {frees}. So memory changes from update to update. "
        f"The values shown are those of update {window.number}; later updates may differ.",
    )


def unsettled(window: Window, peaks: Sequence[Peaks]) -> tuple[str, ...]:
    """The caveat of a window that never settles, with the peaks of its repetitions.

    None where the peaks differ by less than the digits that are shown.
    """
    if len({tuple(map(format_bytes, peak)) for peak in peaks}) < 2:
        return ()
    allocated, reserved = (_span(figures) for figures in zip(*peaks, strict=True))
    noun = "update" if window.stage is Stage.TRAINING else "step"
    last = window.number + len(peaks)
    return (
        f"The allocator does not settle: in {noun}s {window.number + 1} to {last} peak allocated "
        f"is {allocated}, peak reserved {reserved}. The values shown are those of {noun} {last}.",
    )


def _span(figures: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys((format_bytes(min(figures)), format_bytes(max(figures)))))
