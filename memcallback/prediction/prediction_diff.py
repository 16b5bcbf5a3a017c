"""PredictionDiff: what changed between two predictions, from what `predict --json` wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memcallback.core.document import UNKNOWN, Document, Printable, Table, size_text
from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Phase
from memcallback.core.units import format_bytes

#: Rows of a table of modules or lines: those that changed most.
_NUM_ROWS = 12
#: A line's name in the table holds at most so much of its source.
_NUM_CHARACTERS = 48
_HELD = tuple(category.value for category in PERSISTENT_CATEGORIES)
#: What has to be equal for two peaks to be comparable, and what it is called.
CONDITIONS = {
    "device_name": "device",
    "batch_size": "batch size",
    "sequence_length": "sequence length",
}
_VERSIONS = {
    "torch_version": "PyTorch",
    "memcallback_version": "memcallback",
    "architecture_of": "architecture",
}


@dataclass(frozen=True)
class Change:
    """A size before and after.

    Attributes:
        name: What has this size, such as `backward`, `layers.0.mlp` or `loss.py:41 in loss_of`.
        old_bytes: Before; None if there was none.
        new_bytes: After; None if there is none.
        text: Of a line of code its source; empty for all else.
    """

    name: str
    old_bytes: int | None
    new_bytes: int | None
    text: str = ""

    @property
    def change_bytes(self) -> int:
        """How much more it is; less if it is below 0."""
        return (self.new_bytes or 0) - (self.old_bytes or 0)

    def row(self) -> tuple[str, ...]:
        """A row of a table."""
        text = self.text
        if len(text) > _NUM_CHARACTERS:
            text = f"{text[:_NUM_CHARACTERS]}..."
        name = f"{self.name}  {text}".rstrip()
        sizes = size_text(self.old_bytes, "none"), size_text(self.new_bytes, "none")
        return name, *sizes, _signed(self.change_bytes) if self.change_bytes else "same"

    def to_dict(self) -> dict[str, Any]:
        """Data for json."""
        return {
            "name": self.name,
            "text": self.text,
            "old_bytes": self.old_bytes,
            "new_bytes": self.new_bytes,
            "change_bytes": self.change_bytes,
        }


@dataclass(frozen=True)
class PredictionDiff(Printable):
    """What changed between two predictions.

    Modules, lines and categories are those of what is live at each prediction's own peak.

    Attributes:
        old: The prediction before, as `Prediction.to_dict` gives it, with its versions.
        new: The prediction after.
    """

    old: Mapping[str, Any]
    new: Mapping[str, Any]

    @property
    def peak(self) -> Change:
        """The peak that has to fit: reserved; allocated if one of them is on a CPU."""
        return Change(f"peak {self._kind}", *self._peaks)

    @property
    def _peaks(self) -> tuple[int, int]:
        key = f"peak_{self._kind}_bytes"
        return self.old[key], self.new[key]

    @property
    def _kind(self) -> str:
        is_host = None in (self.old["peak_reserved_bytes"], self.new["peak_reserved_bytes"])
        return "allocated" if is_host else "reserved"

    @property
    def by_phase(self) -> tuple[Change, ...]:
        """The allocated peak of each phase of the steady step, in order."""
        old, new = _phase_peaks(self.old), _phase_peaks(self.new)
        return tuple(
            Change(Phase(phase).label, old.get(phase), new.get(phase))
            for phase in dict.fromkeys([*old, *new])
        )

    @property
    def by_category(self) -> tuple[Change, ...]:
        """Live at the peak by category; those that changed, most first."""
        key = "at_peak_by_category_bytes"
        labels = {category.value: category.label for category in Category}
        return _changed(
            Change(labels.get(name, name), self.old[key].get(name), self.new[key].get(name))
            for name in dict.fromkeys([*self.old[key], *self.new[key]])
        )

    @property
    def by_module(self) -> tuple[Change, ...]:
        """Live at the peak by module; those that changed, most first."""
        key = "at_peak_by_module_bytes"
        return _changed(
            Change(name or "(root module)", self.old[key].get(name), self.new[key].get(name))
            for name in dict.fromkeys([*self.old[key], *self.new[key]])
        )

    @cached_property
    def by_line(self) -> tuple[Change, ...]:
        """Live at the peak by the line that made it; those that changed, most first.

        A line that only moved is the same line: lines are matched by file, function and source,
        and what is left over by file, function and number.
        """
        old, new = _lines(self.old), _lines(self.new)
        pairs = [(old.pop(key), new.pop(key)) for key in [*old] if key in new]
        at = {_place(line): key for key, line in new.items()}
        for key, line in [*old.items()]:
            if (other := at.get(_place(line))) is not None:
                pairs.append((old.pop(key), new.pop(other)))
        changes = [
            Change(_line_name(after), before["num_bytes"], after["num_bytes"], after["text"])
            for before, after in pairs
        ]
        changes += [Change(_line_name(o), o["num_bytes"], None, o["text"]) for o in old.values()]
        changes += [Change(_line_name(n), None, n["num_bytes"], n["text"]) for n in new.values()]
        return _changed(changes)

    def verdict(self) -> str:
        """How much the peak changed, where most of it is, and what became of the batch size."""
        parts = [self._peak_sentence()]
        if most := self._most():
            parts.append(most)
        old, new = self.old["largest_batch_size"], self.new["largest_batch_size"]
        if old != new:
            parts.append(f"Largest batch: {_number(old)} -> {_number(new)}.")
        if self.old["fits"] != self.new["fits"] and self.new["fits"] is not None:
            parts.append("It fits now." if self.new["fits"] else "It does not fit any more.")
        return " ".join(parts)

    def _peak_sentence(self) -> str:
        old, new = self._peaks
        if old == new:
            return f"The peak is the same: {format_bytes(new)} {self._kind}."
        size = format_bytes(abs(new - old))
        change = f"adds {size} to" if new > old else f"takes {size} off"
        return (
            f"This change {change} the peak: {format_bytes(old)} -> {format_bytes(new)} "
            f"{self._kind}."
        )

    def _most(self) -> str:
        """Who has most of the change: a line of code, or what the step began with."""
        change = self.new["peak_allocated_bytes"] - self.old["peak_allocated_bytes"]
        held = {Category(name).label for name in _HELD}
        places = [*self.by_line, *(one for one in self.by_category if one.name in held)]
        same_way = [one for one in places if one.change_bytes * change > 0]
        if not same_way:
            return ""
        most = max(same_way, key=lambda one: abs(one.change_bytes))
        joint = "at" if most in self.by_line else "in"
        size = _signed(most.change_bytes)
        return f"The largest part of the change in allocated memory is {joint} {most.name}: {size}."

    @property
    def notes(self) -> tuple[str, ...]:
        """What else than the code differs."""
        return differing(self.old, self.new, CONDITIONS | _VERSIONS)

    def document(self) -> Document:
        """The verdict; what else differs; tables by phase, category, module and line."""
        totals = [
            Change(f"peak {kind}", self.old[key], self.new[key])
            for kind, key in (
                ("allocated", "peak_allocated_bytes"),
                ("reserved", "peak_reserved_bytes"),
            )
            if self.old[key] is not None and self.new[key] is not None
        ]
        return Document(
            self.verdict(),
            *self.notes,
            _table("Peak allocated by phase, and of the whole step", (*self.by_phase, *totals)),
            *(
                _table(f"Live at the peak, by {name}", changes)
                for name, changes in (
                    ("category", self.by_category),
                    ("module", self.by_module),
                    ("line", self.by_line),
                )
                if changes
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Data for json."""
        return {
            "verdict": self.verdict(),
            "peak": self.peak.to_dict(),
            "by_phase": [change.to_dict() for change in self.by_phase],
            "by_category": [change.to_dict() for change in self.by_category],
            "by_module": [change.to_dict() for change in self.by_module],
            "by_line": [change.to_dict() for change in self.by_line],
            "old_largest_batch_size": self.old["largest_batch_size"],
            "new_largest_batch_size": self.new["largest_batch_size"],
            "old_fits": self.old["fits"],
            "new_fits": self.new["fits"],
            "notes": list(self.notes),
        }


def peak_bytes(prediction: Mapping[str, Any]) -> int:
    """The peak that has to fit of a prediction as data: reserved, on a CPU allocated."""
    reserved: int | None = prediction["peak_reserved_bytes"]
    allocated: int = prediction["peak_allocated_bytes"]
    return allocated if reserved is None else reserved


def differing(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[str, ...]:
    """Which of some values of two predictions differ, a sentence each."""
    return tuple(
        f"Another {name}: {_number(old.get(key))} -> {_number(new.get(key))}."
        for key, name in names.items()
        if old.get(key) != new.get(key)
    )


def _number(value: object) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) else str(value)


def _signed(num_bytes: int) -> str:
    return f"{'+' if num_bytes > 0 else ''}{format_bytes(num_bytes)}"


def _changed(changes: Iterator[Change] | Sequence[Change]) -> tuple[Change, ...]:
    some = (change for change in changes if change.change_bytes)
    return tuple(sorted(some, key=lambda change: -abs(change.change_bytes)))


def _table(title: str, changes: Sequence[Change]) -> Table:
    rows = [change.row() for change in changes[:_NUM_ROWS]]
    if rest := changes[_NUM_ROWS:]:
        change = sum(one.change_bytes for one in rest)
        rows.append((f"{len(rest)} more", "", "", _signed(change) if change else "same"))
    return Table(title=title, columns=("", "before", "after", "change"), rows=tuple(rows))


def _phase_peaks(prediction: Mapping[str, Any]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for window in prediction["steps"][-1]["windows"]:
        phase, peak = window["phase"], window["peak_allocated_bytes"]
        peaks[phase] = max(peaks.get(phase, 0), peak)
    return peaks


def _lines(prediction: Mapping[str, Any]) -> dict[tuple[str, str, str | int], dict[str, Any]]:
    """The lines of a prediction, those with the same source in one function together."""
    lines: dict[tuple[str, str, str | int], dict[str, Any]] = {}
    sizes: Counter[tuple[str, str, str | int]] = Counter()
    for line in prediction["at_peak_by_line"]:
        key = line["file"], line["function"], line["text"] or line["line"]
        sizes[key] += line["num_bytes"]
        lines.setdefault(key, line)
    return {key: {**line, "num_bytes": sizes[key]} for key, line in lines.items()}


def _place(line: Mapping[str, Any]) -> tuple[str, str, int]:
    return line["file"], line["function"], line["line"]


def _line_name(line: Mapping[str, Any]) -> str:
    return f"{line['file']}:{line['line']}"
