"""Write an AllocationTrace as JSON and read it back."""

import json
from dataclasses import dataclass, field

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Free,
    ModuleMark,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.types import Category, Phase

#: The version of the JSON text; raised when a reader of the old one could not read the new one.
VERSION = 2
_FORMAT = "memcallback.AllocationTrace"


def to_json(trace):
    """The trace as a compact JSON text, which `from_json` reads; strings that occur often are
    written once.
    """
    names = _Names()
    events = [_to_row(event, names) for event in trace.events]
    marks = [
        [mark.position, [names.index(name) for name in mark.path], mark.is_backward]
        for mark in trace.marks
    ]
    document = {
        "format": _FORMAT,
        "version": VERSION,
        "names": names.names,
        "events": events,
        "marks": marks,
    }
    return json.dumps(document, separators=(",", ":"))


def from_json(text):
    """Read what `to_json` wrote."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the text is no JSON ({error}); give a text that to_json wrote"
        ) from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(
            f"this JSON is no trace; its format must be {_FORMAT!r}: give a text that to_json wrote"
        )
    if document.get("version") != VERSION:
        raise ValueError(
            f"the trace has version {document.get('version')!r}; this memcallback reads version "
            f"{VERSION}: use the memcallback that wrote it, or make the trace again"
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
            f"the trace is damaged ({error!r}); each event is a list as to_json writes it: make "
            "the trace again"
        ) from error
    return AllocationTrace(events, marks)


@dataclass
class _Names:
    """Strings by the number of their first use."""

    names: list[str] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)

    def index(self, name):
        if name not in self._index:
            self._index[name] = len(self.names)
            self.names.append(name)
        return self._index[name]


def _to_row(event, names):
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


def _from_row(row, names):
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
        f"the trace has an event {code!r}; known are a, f, start, end, step and step end: make the "
        "trace again"
    )
