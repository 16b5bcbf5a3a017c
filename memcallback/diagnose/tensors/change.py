"""TensorChange: the result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from memcallback.core.code_lines import CodeLine
from memcallback.core.document import Document, Printable, Table
from memcallback.core.types import Category
from memcallback.core.units import format_bytes

#: Of what came, and of what went: the largest groups. All are in the data.
_NUM_ROWS = 20
#: Owners named of a group.
_NUM_OWNERS = 2


@dataclass(frozen=True, kw_only=True)
class TensorMark:
    """A point of a program, and the device's memory there. All sizes in bytes, measured.

    Attributes:
        label: What it was called; empty for nothing.
        at: The line.
        known_bytes: Of the storages that were found.
        num_storages: How many these are.
        allocated_bytes: Of the device's allocator; None where there is none, on a CPU.
        requested_bytes: What was asked of it, before it rounded up to its blocks; None if it does
            not tell.
        reserved_bytes: What it has taken from the device.
        resident_bytes: The process's resident size (CPU only).
    """

    label: str
    at: CodeLine
    known_bytes: int
    num_storages: int
    allocated_bytes: int | None = None
    requested_bytes: int | None = None
    reserved_bytes: int | None = None
    resident_bytes: int | None = None

    @property
    def rounding_bytes(self) -> int | None:
        """What the allocator gave beyond what was asked for; None where that is not known."""
        if self.allocated_bytes is None or self.requested_bytes is None:
            return None
        return self.allocated_bytes - self.requested_bytes

    @property
    def unattributed_bytes(self) -> int | None:
        """What was asked of the allocator (or, where it does not tell that, what it gave) beyond
        the storages that were found.

        Workspaces of cuBLAS and cuDNN, and storages that only C++ holds. None on a CPU. It is
        negative where storages were found that the allocator does not have, such as those of
        another process.
        """
        asked = self.allocated_bytes if self.requested_bytes is None else self.requested_bytes
        return None if asked is None else asked - self.known_bytes

    def __str__(self) -> str:
        named = f" ({self.label})" if self.label else ""
        return f"{self.at}{named}"


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Storages that are alike and came or went together.

    Attributes:
        count: How many.
        shape: Of each.
        dtype: Of each, such as `float32`.
        size_bytes: Of all together.
        category: What they are for; None if that is not known.
        owners: Who holds or held them, as `LiveTensor.owner` says it, sorted; without an owner, the
            operator that made them.
        modules: The modules that have them or made them, as far as that is known; the root is "".
        made_at: The line that made them; None if that was not seen.
    """

    count: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    category: Category | None
    owners: tuple[str, ...]
    modules: tuple[str, ...]
    made_at: CodeLine | None

    @property
    def label(self) -> str:
        """The first owners, and how many more there are."""
        named = ", ".join(self.owners[:_NUM_OWNERS])
        return (
            f"{named} and {len(self.owners) - _NUM_OWNERS} more"
            if len(self.owners) > _NUM_OWNERS
            else named
        )


@dataclass(frozen=True, kw_only=True)
class TensorChange(Printable):
    """What came and went between two points.

    Attributes:
        before: The first point; None for what was there at the first mark of all, of which only the
            totals are told.
        after: The second one.
        appeared: What is there at the second point and was not at the first, the largest group
            first.
        vanished: What was there at the first point and is not at the second, the largest group
            first.
        device_name: The device.
        notes: What cannot be seen, one sentence each.
    """

    before: TensorMark | None
    after: TensorMark
    appeared: tuple[TensorGroup, ...]
    vanished: tuple[TensorGroup, ...]
    device_name: str
    notes: tuple[str, ...] = ()

    @property
    def appeared_bytes(self) -> int:
        """Of all that came."""
        return sum(group.size_bytes for group in self.appeared)

    @property
    def vanished_bytes(self) -> int:
        """Of all that went."""
        return sum(group.size_bytes for group in self.vanished)

    def to_table(self) -> Table:
        """One row for each of the largest groups that came (+) and went (-)."""
        columns: tuple[str, ...] = (
            "",
            "number",
            "shape",
            "dtype",
            "size",
            "for",
            "owner",
            "made at",
        )
        rows = [*_rows("+", self.appeared), *_rows("-", self.vanished)]
        if not any(row[-1] for row in rows):  # there was no ledger
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        between = f"From {self.before} to {self.after}" if self.before else f"At {self.after}"
        return Table(
            title=f"{between} on {self.device_name}, measured\n{self._totals()}",
            columns=columns,
            rows=tuple(rows),
            left_columns=frozenset({"shape", "dtype", "for", "owner", "made at"}),
        )

    def _totals(self) -> str:
        """The device's figures at both points."""
        names = {
            "allocated_bytes": "allocated",
            "reserved_bytes": "reserved",
            "known_bytes": "known storages",
            "resident_bytes": "resident size of the process",
        }
        figures = (
            (label, getattr(self.before, name, None), getattr(self.after, name))
            for name, label in names.items()
        )
        return "; ".join(
            f"{name} {_from_to(first, last)}" for name, first, last in figures if last is not None
        )

    def lines(self) -> tuple[str, ...]:
        """What came and went in sum, what of the device's memory is not in the table, and what
        cannot be seen.
        """
        lines = []
        if self.before is not None:
            came, went = _sum("appeared", self.appeared), _sum("vanished", self.vanished)
            lines.append(f"In all {came}, {went}.")
        rest = self.after.unattributed_bytes
        if rest is not None:
            grown = (
                ""
                if self.before is None
                else f" ({_signed(rest - (self.before.unattributed_bytes or 0))})"
            )
            what = ", which is workspaces, and storages that only C++ holds" if rest > 0 else ""
            lines.append(f"Unattributed: {format_bytes(rest)}{grown}{what}.")
            rounding = self.after.rounding_bytes
            if rounding is not None:
                grown = (
                    ""
                    if self.before is None
                    else f" ({_signed(rounding - (self.before.rounding_bytes or 0))})"
                )
                lines.append(
                    f"Rounding up to the allocator's blocks: {format_bytes(rounding)}{grown}."
                )
        return (*lines, *self.notes)

    def document(self) -> Document:
        """What came and went, and what it does not show."""
        table = self.to_table()
        return Document(*([table] if table.rows else table.title.splitlines()), *self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Data that json writes, with the unit in every key."""
        return {
            "device_name": self.device_name,
            "before": None if self.before is None else _mark_dict(self.before),
            "after": _mark_dict(self.after),
            "appeared_bytes": self.appeared_bytes,
            "vanished_bytes": self.vanished_bytes,
            "appeared": [_group_dict(group) for group in self.appeared],
            "vanished": [_group_dict(group) for group in self.vanished],
            "notes": list(self.notes),
        }


def _rows(sign: str, groups: tuple[TensorGroup, ...]) -> Iterable[tuple[str, ...]]:
    for group in groups[:_NUM_ROWS]:
        yield (
            sign,
            f"{group.count} x",
            str(group.shape),
            group.dtype,
            format_bytes(group.size_bytes),
            "" if group.category is None else group.category.label,
            group.label,
            "" if group.made_at is None else str(group.made_at),
        )
    if rest := groups[_NUM_ROWS:]:
        size = format_bytes(sum(group.size_bytes for group in rest))
        yield (
            sign,
            f"{sum(group.count for group in rest)} x",
            "",
            "",
            size,
            "",
            f"{len(rest)} smaller groups",
            "",
        )


def _sum(verb: str, groups: tuple[TensorGroup, ...]) -> str:
    number = sum(group.count for group in groups)
    size = format_bytes(sum(group.size_bytes for group in groups))
    return (
        f"{size} {verb} in {number} storage{'' if number == 1 else 's'}"
        if number
        else f"nothing {verb}"
    )


def _from_to(first: int | None, last: int) -> str:
    if first is None:
        return format_bytes(last)
    return f"{format_bytes(first)} -> {format_bytes(last)} ({_signed(last - first)})"


def _signed(num_bytes: int) -> str:
    if num_bytes == 0:
        return "unchanged"
    return f"+{format_bytes(num_bytes)}" if num_bytes > 0 else format_bytes(num_bytes)


def _mark_dict(mark: TensorMark) -> dict[str, Any]:
    return asdict(mark) | {
        "at": mark.at.to_dict(),
        "rounding_bytes": mark.rounding_bytes,
        "unattributed_bytes": mark.unattributed_bytes,
    }


def _group_dict(group: TensorGroup) -> dict[str, Any]:
    category = None if group.category is None else group.category.value
    return asdict(group) | {
        "category": category,
        "made_at": group.made_at and group.made_at.to_dict(),
    }
