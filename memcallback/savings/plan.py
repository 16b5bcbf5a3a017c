"""Plan: the what-if table, a step as it is and with each saving."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from itertools import chain, islice, zip_longest
from typing import Any

from memcallback.core.document import (
    Block,
    Code,
    Document,
    Heading,
    Paragraph,
    Printable,
    Table,
    size_text,
)
from memcallback.core.units import format_bytes

#: A saving helps from this share of the peak, or of the largest batch size, in percent.
_NOTABLE_PCT = 1.0
#: Savings named in the sentence about a step that does not fit.
_NUM_NAMED = 3
#: Savings in the printed table.
_NUM_SHOWN = 10
#: Columns for their names, and those that bytes sent take of them: a table is 100 columns wide.
_NAME_WIDTH, _SENT_WIDTH = 44, 12
#: A space at which no line ends.
_TOGETHER = "\N{NO-BREAK SPACE}"


class SavingGroup(str, Enum):
    """What a saving does to the training; a member's value is the name of the group in words.

    A later group changes more. Several savings together are in the latest of their groups.

    Attributes:
        SAME_RESULT: The weights are the same to the bit.
        CHANGES_NUMBERS: The same model is trained by the same rule on the same data. Only rounding
            differs.
        CHANGES_TRAINING: Another rule, other data, other samples in an update, or weights that lose
            precision or are not trained at all.
    """

    SAME_RESULT = "same result"
    CHANGES_NUMBERS = "changes the numbers"
    CHANGES_TRAINING = "changes the training"

    @classmethod
    def latest(cls, groups: Iterable[SavingGroup]) -> SavingGroup:
        """The one of several that changes most."""
        return max(groups, key=[*cls].index)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """The predicted memory of a training step with a saving.

    Attributes:
        saving: The saving, or several joined by ` + `.
        kind: What it changes, such as `precision` or `checkpointing`; kinds of several savings are
            joined like their names.
        group: What it does to the training. The row of the step as it is has `SAME_RESULT`.
        batch_size: Samples in one forward pass; the number between two updates is the same as
            without the saving.
        peak_allocated_bytes: Peak of allocated memory in the steady step; None if the step could
            not be predicted.
        peak_reserved_bytes: Peak of reserved memory; None also on a CPU.
        largest_batch_size: The most samples in one forward pass that are sure to fit with the
            headroom; 0 if not even one is; None if unknown.
        extra_compute_pct: Floating-point operations per sample beyond those without the saving, in
            percent, by PyTorch's formulas (torch.utils.flop_counter); None if they count no
            operation of the step.
        sent_bytes: Bytes that a rank sends between two updates, by the formulas of ring
            collectives; 0 on one device.
        changes: What it changes in the numbers that training computes.
        line: The line to paste into a program.
        problem: Why it could not be predicted, or does not work with this model; else empty.
        fits: Whether it is predicted to fit the device; None if it could not be predicted.
    """

    saving: str
    kind: str = ""
    group: SavingGroup = SavingGroup.SAME_RESULT
    batch_size: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    largest_batch_size: int | None = None
    extra_compute_pct: float | None = None
    sent_bytes: int = 0
    changes: str = ""
    line: str = ""
    problem: str = ""
    fits: bool | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The peak that must fit: of reserved memory, on a CPU of allocated memory."""
        reserved = self.peak_reserved_bytes
        return self.peak_allocated_bytes if reserved is None else reserved

    @property
    def is_several(self) -> bool:
        """Whether it is several savings together."""
        return " + " in self.saving

    @property
    def rank(self) -> tuple[int, int, float]:
        """A key to sort rows by: larger batches first, then smaller peaks, then less computation.

        `Plan.is_best` looks at the peak first.
        """
        return -(self.largest_batch_size or 0), self.peak_bytes or 0, self.extra_compute_pct or 0.0


@dataclass(frozen=True, kw_only=True)
class Plan(Printable):
    """The answer of `what_if`: the step as it is and with each saving.

    Attributes:
        current: The step as it is.
        tried: The step with savings, in the order in which they were tried.
        device_name: The device.
        capacity_bytes: Its memory; None if unknown.
        headroom: The fraction of it that the largest batch sizes keep free.
        outside_bytes: Bytes of it used outside this process's allocator; None if unknown: then room
            for the device's context is kept free.
        architecture_of: The card whose architecture was assumed, if only a size was given.
        caveats: What was assumed of the step as it is.
    """

    current: PlanRow
    tried: tuple[PlanRow, ...]
    device_name: str
    capacity_bytes: int | None
    headroom: float
    outside_bytes: int | None = None
    architecture_of: str | None = None
    caveats: tuple[str, ...] = ()

    def helps(self, row: PlanRow) -> bool:
        """Whether the peak is smaller with it, or the largest batch is larger, by 1 % at least."""
        if row.problem or row is self.current:
            return False
        return self._has_smaller_peak(row) or self._has_larger_batch(row)

    def _has_smaller_peak(self, row: PlanRow) -> bool:
        saved_pct = self.saved_pct(row)
        return saved_pct is not None and saved_pct >= _NOTABLE_PCT

    def _has_larger_batch(self, row: PlanRow) -> bool:
        here, there = self.current.largest_batch_size, row.largest_batch_size
        return (
            here is not None
            and there is not None
            and there > here
            and 100 * (there - here) >= _NOTABLE_PCT * here
        )

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """Savings that help, smallest peak first; then those that do not; then those that fail."""

        def key(row: PlanRow) -> tuple[bool, bool, int, int]:
            # Peaks of reserved memory are often alike: then the larger batch comes first.
            largest = row.largest_batch_size or 0
            return bool(row.problem), not self.helps(row), row.peak_bytes or 0, -largest

        return tuple(sorted(self.tried, key=key))

    def helping(self, group: SavingGroup) -> tuple[PlanRow, ...]:
        """The savings of a group that help, smallest peak first."""
        return tuple(row for row in self.rows if row.group == group and self.helps(row))

    def is_best(self, row: PlanRow) -> bool:
        """Whether several savings of its group help, and this one has the smallest peak."""
        helping = self.helping(row.group)
        return len(helping) > 1 and row is helping[0]

    def name_of(self, row: PlanRow) -> str:
        """The saving; the best of its group is marked."""
        return f"{row.saving} (best)" if self.is_best(row) else row.saving

    @cached_property
    def shown(self) -> tuple[PlanRow, ...]:
        """Up to ten savings that help: the best of each group, then of each kind, then others."""
        in_turn = zip_longest(*(self._by_interest(group) for group in SavingGroup))
        some = islice((row for row in chain.from_iterable(in_turn) if row is not None), _NUM_SHOWN)
        chosen = {id(row) for row in some}
        return tuple(
            row for group in SavingGroup for row in self.helping(group) if id(row) in chosen
        )

    def _by_interest(self, group: SavingGroup) -> list[PlanRow]:
        """The best of a group, the best of each kind on its own, and the rest."""
        helping = self.helping(group)
        best: dict[str, PlanRow] = {}
        for row in helping:
            if not row.is_several:
                best.setdefault(row.kind, row)
        first = (*helping[:1], *best.values())
        return sorted(helping, key=lambda row: all(row is not one for one in first))

    def saved_pct(self, row: PlanRow) -> float | None:
        """By how much the peak falls, in percent of the present one; negative if it rises."""
        if row.peak_bytes is None or not self.current.peak_bytes:
            return None
        return 100 * (1 - row.peak_bytes / self.current.peak_bytes)

    def to_table(self) -> Table:
        """The savings that help, ten at most, by group below the step as it is."""
        rows, ends = [self._cells(self.current)], [0]
        for group in SavingGroup:
            shown = [row for row in self.shown if row.group == group]
            if shown:
                rows.append((group.value, *[""] * (len(rows[0]) - 1)))
                rows += map(self._cells, shown)
                ends.append(len(rows) - 1)
        return Table(
            title=f"What savings would buy (batch size {self.current.batch_size:,}) on "
            f"{self._device()}\nEach row is a prediction of its own. In each group the "
            f"smallest {self._counts()} peak comes first.",
            columns=(
                "saving",
                "allocated",
                "reserved",
                "saved",
                "fits up to",
                "compute",
                *self._sent_column(),
            ),
            rows=tuple(rows),
            rules_after=frozenset(ends),
        )

    def _counts(self) -> str:
        """Which memory has to fit."""
        return "allocated" if self.current.peak_reserved_bytes is None else "reserved"

    def _device(self) -> str:
        """The device, its size, and the part of it that batches cannot have."""
        text = self.device_name
        if self.capacity_bytes is not None:
            capacity = format_bytes(self.capacity_bytes)
            # The name of a card given by its size ends with the size.
            text += "" if text.endswith(capacity) else f" of {capacity}"
            text += f", at least {100 * self.headroom:g} % kept free"
        if self.outside_bytes is not None:
            text += f", {format_bytes(self.outside_bytes)} in use outside the allocator"
        return text

    def _sent_column(self) -> tuple[str, ...]:
        return ("sent",) if any(row.sent_bytes for row in self.tried) else ()

    def _cells(self, row: PlanRow) -> tuple[str, ...]:
        saved, extra = self.saved_pct(row), row.extra_compute_pct
        return (
            row.saving if row is self.current else self._name_cell(row),
            size_text(row.peak_allocated_bytes, ""),
            size_text(row.peak_reserved_bytes, ""),
            f"{saved:.1f} %" if self._has_smaller_peak(row) else "",
            "?" if row.largest_batch_size is None else f"{row.largest_batch_size:,}",
            "" if row is self.current or extra is None else _change_text(extra),
            *(size_text(row.sent_bytes or None, "") for _ in self._sent_column()),
        )

    def _name_cell(self, row: PlanRow) -> str:
        """The name below its group; a long one goes on in further lines, cut between savings."""
        width = _NAME_WIDTH - (_SENT_WIDTH if self._sent_column() else 0)
        name = self.name_of(row)
        if row.is_several:
            name = " + ".join(part.replace(" ", _TOGETHER) for part in name.split(" + "))
        lines = textwrap.wrap(name, width, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines).replace(_TOGETHER, " ")

    def _left_out(self) -> Iterator[str]:
        """How many savings the table leaves out."""
        known = [row for row in self.tried if not row.problem]
        num_helping = sum(map(self.helps, known))
        parts = (
            (num_helping - len(self.shown), "more that helps", "more that help"),
            (len(known) - num_helping, "that does not help", "that do not help"),
        )
        named = " and ".join(
            f"{number} {one if number == 1 else many}" for number, one, many in parts if number
        )
        if named:
            yield f"Left out: {named}. JSON and Plan.rows have them all."

    def _how_to(self) -> Iterator[Block]:
        """The lines to paste, and what does not work."""
        single = [row for row in self.shown if not row.is_several]
        if single:
            yield Heading("How to turn each on, and what it changes:")
        for row in single:
            yield Paragraph(f"{self.name_of(row)}: {row.changes}", 1)
            yield Code(row.line, 2)
        failed = [row for row in self.rows if row.problem]
        if failed:
            yield Heading("Could not be predicted:")
        for row in failed:
            yield Paragraph(f"{row.saving}: {row.problem}", 1)

    def _if_nothing_fits(self) -> tuple[str, ...]:
        """If not even one sample fits: the savings with which one does, the best first."""
        if self.current.largest_batch_size != 0:
            return ()
        fitting = sorted(
            (row for row in self.tried if row.largest_batch_size), key=lambda row: row.rank
        )
        if not fitting:
            return ("Not even one sample is sure to fit, as it is or with any of these savings.",)
        named = [f"{row.saving} (up to {row.largest_batch_size:,})" for row in fitting[:_NUM_NAMED]]
        more = f" or {len(fitting) - _NUM_NAMED} more" if len(fitting) > _NUM_NAMED else ""
        return (
            "As it is, not even one sample is sure to fit. "
            f"A batch fits with {' or '.join(named)}{more}.",
        )

    def document(self) -> Document:
        """The table, how to have each saving, and what was assumed."""
        return Document(
            self.to_table(),
            *self._left_out(),
            *self._if_nothing_fits(),
            *self._how_to(),
            *self.caveats,
        )

    def to_dict(self) -> dict[str, Any]:
        """Data that json writes, with the unit in every key."""
        return {
            "device_name": self.device_name,
            "architecture_of": self.architecture_of,
            "capacity_bytes": self.capacity_bytes,
            "headroom_pct": 100 * self.headroom,
            "outside_bytes": self.outside_bytes,
            "current": asdict(self.current),
            "savings": [
                {
                    **asdict(row),
                    "helps": self.helps(row),
                    "is_best": self.is_best(row),
                    "saved_pct": self.saved_pct(row),
                }
                for row in self.rows
            ],
            "caveats": list(self.caveats),
        }


def _change_text(percent: float) -> str:
    """A change with its sign, and none that rounds to 0."""
    return f"{percent:+.1f} %" if abs(percent) >= 0.05 else "0.0 %"
