"""TensorChange: which storages appeared and vanished between two points, as data and as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from memcallback.core.code_lines import CodeLine
from memcallback.core.document import Document, Printable, Table
from memcallback.core.types import Category
from memcallback.core.units import format_bytes

#: Rows of the table for each of appeared and vanished: the largest groups. The data has all.
_NUM_ROWS = 20
#: Owners named for a group.
_NUM_OWNERS = 2
#: Columns of the table for them, so that it fits a console.
_OWNER_WIDTH = 36


@dataclass(frozen=True, kw_only=True)
class TensorMark:
    """A point of a program and the device's memory there, measured.

    Attributes:
        label: The label given to the mark; empty for none.
        at: The line of the program.
        known_bytes: Total size of the storages that were found, in bytes.
        num_storages: The number of these storages.
        allocated_bytes: Allocated by the device's allocator, in bytes; None on a CPU.
        requested_bytes: Requested from the allocator before it rounded up to its blocks, in bytes;
            None if unknown.
        reserved_bytes: Reserved by the allocator, in bytes; None on a CPU.
        resident_bytes: The resident set size of the process, in bytes; CPU only.
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
        """Allocated minus requested bytes; None if unknown."""
        if self.allocated_bytes is None or self.requested_bytes is None:
            return None
        return self.allocated_bytes - self.requested_bytes

    @property
    def unattributed_bytes(self) -> int | None:
        """Requested bytes (if unknown, allocated ones) minus those of the storages found.

        These are workspaces of cuBLAS and cuDNN, and storages that only C++ holds. None on a CPU.
        Negative if a storage found is not the allocator's, such as one of another process.
        """
        requested = self.allocated_bytes if self.requested_bytes is None else self.requested_bytes
        return None if requested is None else requested - self.known_bytes

    def __str__(self) -> str:
        return f"{self.at} ({self.label})" if self.label else str(self.at)


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Similar storages that appeared or vanished together.

    Attributes:
        count: The number of storages.
        shape: The shape of each.
        dtype: The dtype of each, such as `float32`.
        size_bytes: Their total size, in bytes.
        category: Their category; None if unknown.
        owners: Their owners, sorted, such as `gradient of fc.weight` or `variable 'cache' in
            train.py`; without an owner, the operator that made them.
        modules: The modules that own or made them, if known; the root is "".
        made_at: The line that made them; None without a ledger.
    """

    count: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    category: Category | None
    owners: tuple[str, ...]
    modules: tuple[str, ...]
    made_at: CodeLine | None


@dataclass(frozen=True, kw_only=True)
class TensorChange(Printable):
    """The storages that appeared and vanished between two points of a program.

    Attributes:
        before: The first point; None for the very first mark, which shows only totals.
        after: The second point.
        appeared: Storages alive at the second point but not at the first, largest group first.
        vanished: Storages alive at the first point but not at the second, largest group first.
        device_name: The device.
        notes: Limits of the comparison, one sentence each.
    """

    before: TensorMark | None
    after: TensorMark
    appeared: tuple[TensorGroup, ...]
    vanished: tuple[TensorGroup, ...]
    device_name: str
    notes: tuple[str, ...] = ()

    @property
    def appeared_bytes(self) -> int:
        """Total size of the storages that appeared, in bytes."""
        return sum(group.size_bytes for group in self.appeared)

    @property
    def vanished_bytes(self) -> int:
        """Total size of the storages that vanished, in bytes."""
        return sum(group.size_bytes for group in self.vanished)

    def to_table(self) -> Table:
        """A table of the largest groups that appeared (+) and vanished (-)."""
        rows = [*_rows("+", self.appeared), *_rows("-", self.vanished)]
        between = f"From {self.before} to {self.after}" if self.before else f"At {self.after}"
        return Table(
            title=f"{between} on {self.device_name}, measured\n{self._totals()}",
            columns=("", "number", "shape", "dtype", "size", "for", "owner"),
            rows=tuple(rows),
            left_columns=frozenset({"shape", "dtype", "for", "owner"}),
        )

    def _totals(self) -> str:
        """The device's memory at both points."""
        labels = {
            "allocated_bytes": "allocated",
            "reserved_bytes": "reserved",
            "known_bytes": "known storages",
            "resident_bytes": "resident size of the process",
        }
        return "\n".join(
            f"{label} {_from_to(getattr(self.before, name, None), value)}"
            for name, label in labels.items()
            if (value := getattr(self.after, name)) is not None
        )

    def lines(self) -> tuple[str, ...]:
        """Sentences: the sums, the memory that is not in the table, and the notes."""
        lines = []
        if self.before is not None:
            appeared = _sum("appeared", self.appeared)
            lines.append(f"In all, {appeared}, {_sum('vanished', self.vanished)}.")
        rest = self.after.unattributed_bytes
        if rest is not None:
            before = None if self.before is None else self.before.unattributed_bytes or 0
            source = ", from workspaces and storages that only C++ holds" if rest > 0 else ""
            lines.append(f"Unattributed: {format_bytes(rest)}{_change(before, rest)}{source}.")
        rounding = self.after.rounding_bytes
        if rest is not None and rounding is not None:
            before = None if self.before is None else self.before.rounding_bytes or 0
            size = f"{format_bytes(rounding)}{_change(before, rounding)}"
            lines.append(f"Rounding up to the allocator's blocks: {size}.")
        return (*lines, *self.notes)

    def document(self) -> Document:
        """The table and the sentences below it."""
        table = self.to_table()
        return Document(*([table] if table.rows else table.title.splitlines()), *self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the unit in every key."""
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
            _owner_cell(group),
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
        )


def _owner_cell(group: TensorGroup) -> str:
    """The first owners, the number of others, and the line that made them, in narrow lines."""
    parts = list(group.owners[:_NUM_OWNERS])
    if (num_others := len(group.owners) - _NUM_OWNERS) > 0:
        parts.append(f"and {num_others} more")
    if group.made_at is not None:
        parts.append(f"made at {group.made_at}")
    filled = (
        textwrap.fill(part, _OWNER_WIDTH, subsequent_indent="  ", break_long_words=False)
        for part in parts
    )
    return "\n".join(filled)


def _sum(verb: str, groups: tuple[TensorGroup, ...]) -> str:
    count = sum(group.count for group in groups)
    if not count:
        return f"nothing {verb}"
    size = format_bytes(sum(group.size_bytes for group in groups))
    return f"{size} {verb} in {count} storage{'' if count == 1 else 's'}"


def _from_to(first: int | None, last: int) -> str:
    if first is None:
        return format_bytes(last)
    return f"{format_bytes(first)} -> {format_bytes(last)}{_change(first, last)}"


def _change(before: int | None, now: int) -> str:
    """The change of a size in brackets; empty without an earlier one."""
    if before is None:
        return ""
    change = now - before
    sign = "+" if change > 0 else ""
    return f" ({sign}{format_bytes(change)})" if change else " (unchanged)"


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
