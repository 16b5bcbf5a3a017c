"""AllocationTrace: the allocs, frees and phase marks of a step, as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memcallback.core.types import Category, Phase


@dataclass(frozen=True, slots=True)
class Alloc:
    """A storage of device memory comes into being.

    Attributes:
        id: Its number, used by one allocation only in the whole trace.
        size_bytes: What was asked for, before any rounding; 0 for an empty tensor, which takes
            nothing from an allocator.
        stream: The CUDA stream it belongs to; 0 is the default stream.
        category: What it is for; None if unknown.
        operator: What asked for it, such as `aten::convolution`; empty if unknown.
        module: The fully qualified name of the module that was running; the root is "".
    """

    id: int
    size_bytes: int
    stream: int = 0
    category: Category | None = None
    operator: str = ""
    module: str = ""

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(
                f"allocation {self.id} has size_bytes={self.size_bytes}; a size is 0 or more bytes: give the size of the storage"
            )


@dataclass(frozen=True, slots=True)
class Free:
    """The storage of an earlier `Alloc` is given back.

    Attributes:
        id: The number of that `Alloc`.
    """

    id: int


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """What follows belongs to a phase.

    Attributes:
        phase: The phase.
        covers: All the phases in it, where nothing marks the boundary between them; none for the
            phase alone.
    """

    phase: Phase
    covers: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """The phase that was started last is over.

    Attributes:
        phase: The phase.
    """

    phase: Phase


@dataclass(frozen=True, slots=True)
class StepStart:
    """What follows is one training step: one call of the loop's body with one batch."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The step is over."""


Event = Alloc | Free | PhaseStart | PhaseEnd | StepStart | StepEnd


class ModuleMark(NamedTuple):
    """From here on other modules run.

    Attributes:
        position: The position of the event, or the number of the reading, from which on they do.
        path: The FQNs of the modules that run, the outermost first; none where no module does.
        is_backward: Whether their part of a backward pass runs.
    """

    position: int
    path: tuple[str, ...]
    is_backward: bool = False


#: The version of the JSON text; raised when a reader of the old one could not read the new one.
VERSION = 2
_FORMAT = "memcallback.AllocationTrace"


@dataclass(frozen=True)
class AllocationTrace:
    """What training asks of an allocator: allocations, frees, steps and phases in the order in
    which they happen.

    A trace for a prediction begins with the model, has a first step, without gradients and
    optimizer state, and goes on until a steady one.

    It says nothing about addresses, rounding or reserved memory: those are what an allocator makes
    of it. Memory that a stream still uses after another has freed it (`Tensor.record_stream`) has
    no place here: when that comes back depends on time.

    Attributes:
        events: The events. Every `Free` has an earlier `Alloc`, no number is used twice, phases do
            not overlap, nor do steps, and a phase lies inside a step or outside of all.
        marks: Where which modules begin to run, in order; none if that is not known. When a phase
            begins none runs.
    """

    events: tuple[Event, ...]
    marks: tuple[ModuleMark, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.events)

    def __repr__(self) -> str:
        return f"<AllocationTrace: {len(self.events):,} events>"

    def to_json(self) -> str:
        """The trace as a compact JSON text, which `from_json` reads; strings that occur often are
        written once.
        """
        names = _Names()
        events = [_to_row(event, names) for event in self.events]
        marks = [
            [mark.position, [names.index(name) for name in mark.path], mark.is_backward]
            for mark in self.marks
        ]
        document = {
            "format": _FORMAT,
            "version": VERSION,
            "names": names.names,
            "events": events,
            "marks": marks,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> AllocationTrace:
        """Read what `to_json` wrote."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"the text is no JSON ({error}); give a text that AllocationTrace.to_json wrote"
            ) from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(
                f"this JSON is no trace; its format must be {_FORMAT!r}: give a text that AllocationTrace.to_json wrote"
            )
        if document.get("version") != VERSION:
            raise ValueError(
                f"the trace has version {document.get('version')!r}; this memcallback reads version {VERSION}: "
                "use the memcallback that wrote it, or make the trace again"
            )
        try:
            names = document["names"]
            events = tuple(_from_row(row, names) for row in document["events"])
            marks = tuple(
                ModuleMark(position, tuple(names[index] for index in path), is_backward)
                for position, path, is_backward in document.get("marks", ())
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"the trace is damaged ({error!r}); each event is a list as to_json writes it: make the trace again"
            ) from error
        return cls(events, marks)


@dataclass
class _Names:
    """Strings by the number of their first use."""

    names: list[str] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)

    def index(self, name: str) -> int:
        if name not in self._index:
            self._index[name] = len(self.names)
            self.names.append(name)
        return self._index[name]


def _to_row(event: Event, names: _Names) -> list[object]:
    if isinstance(event, Alloc):
        category = None if event.category is None else event.category.value
        return [
            "a",
            event.id,
            event.size_bytes,
            event.stream,
            category,
            names.index(event.operator),
            names.index(event.module),
        ]
    if isinstance(event, Free):
        return ["f", event.id]
    if isinstance(event, (StepStart, StepEnd)):
        return ["step" if isinstance(event, StepStart) else "step end"]
    if isinstance(event, PhaseStart) and event.covers:
        return ["start", event.phase.value, [phase.value for phase in event.covers]]
    return ["start" if isinstance(event, PhaseStart) else "end", event.phase.value]


def _from_row(row: Sequence[Any], names: Sequence[str]) -> Event:
    code, *values = row
    if code == "a":
        id_, size_bytes, stream, category, operator, module = values
        kind = None if category is None else Category(category)
        return Alloc(id_, size_bytes, stream, kind, names[operator], names[module])
    if code == "f":
        return Free(*values)
    if code in ("start", "end"):
        phase = Phase(values[0])
        covers = tuple(map(Phase, values[1])) if len(values) > 1 else ()
        return PhaseStart(phase, covers) if code == "start" else PhaseEnd(phase)
    if code in ("step", "step end"):
        return StepStart() if code == "step" else StepEnd()
    raise ValueError(
        f"the trace has an event {code!r}; known are a, f, start, end, step and step end: make the trace again"
    )


def _check(events: Sequence[Event]) -> None:
    """Raise ValueError at the first event that cannot follow those before it."""
    seen: set[int] = set()
    alive: set[int] = set()
    phases: list[Phase] = []
    in_step = False
    for position, event in enumerate(events):
        if isinstance(event, Alloc):
            if event.id in seen:
                raise ValueError(
                    f"event {position} allocates {event.id} again; a number belongs to one allocation: number them on"
                )
            seen.add(event.id)
            alive.add(event.id)
        elif isinstance(event, Free):
            if event.id not in alive:
                what = "is freed already" if event.id in seen else "was never allocated"
                raise ValueError(
                    f"event {position} frees {event.id}, which {what}; a Free follows its own Alloc, once: leave this one out"
                )
            alive.remove(event.id)
        elif isinstance(event, (StepStart, StepEnd)):
            if phases or in_step is isinstance(event, StepStart):
                what = (
                    f"inside phase {phases[0].value!r}"
                    if phases
                    else "inside another"
                    if in_step
                    else "that has not started"
                )
                raise ValueError(
                    f"event {position} starts or ends a step {what}; steps do not overlap and hold whole phases: put the mark between phases"
                )
            in_step = not in_step
        else:
            _check_mark(position, event, phases)
    if in_step:
        raise ValueError("a step has a start and no end; every step has both: append StepEnd()")
    if phases:
        raise ValueError(
            f"phase {phases[0].value!r} has a start and no end; every phase has both: append PhaseEnd({phases[0]})"
        )


def _check_mark(position: int, mark: PhaseStart | PhaseEnd, phases: list[Phase]) -> None:
    """Keep in `phases` the one that is going on, if any."""
    current = phases[0].value if phases else None
    if isinstance(mark, PhaseStart):
        if phases:
            raise ValueError(
                f"event {position} starts phase {mark.phase.value!r} inside {current!r}; phases do not overlap: end the other first"
            )
        phases.append(mark.phase)
    elif phases != [mark.phase]:
        raise ValueError(
            f"event {position} ends phase {mark.phase.value!r} while the current one is {current!r}; start it before"
        )
    else:
        phases.clear()
