"""Block: the allocations of one batch, to be compared with those of another batch and repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memcallback.core.allocation_trace import Event, Free, ModuleMark
from memcallback.core.kernel import FIRST_TEMPORARY, KernelCall
from memcallback.trace.dispatch.entries import Entry

#: What happens in a trace; an allocation's kind may be known later.
Row = Entry | Event


class Position(NamedTuple):
    """The numbers that the next row, allocation, temporary, call and mark of a ledger will get."""

    row: int
    entry: int
    temporary: int
    call: int
    mark: int


@dataclass(frozen=True)
class Block:
    """The rows, calls and marks between two positions of a ledger."""

    start: Position
    end: Position
    rows: Sequence[Row | list[Row]]
    calls: Sequence[KernelCall]
    marks: Sequence[ModuleMark]

    @property
    def size(self) -> Position:
        """How many of each it has."""
        return Position(*(end - start for start, end in zip(self.start, self.end, strict=True)))

    def has_live(self) -> bool:
        """Whether something that it allocated was not freed."""
        return any(isinstance(row, Entry) and not row.is_freed for row in self.rows)

    def described(self) -> list[object] | None:
        """All of it, numbered from its start; None if a row is not known yet."""
        rows: list[object] = []
        frees: list[int] = []
        for row in self.rows:
            if isinstance(row, list):
                return None
            if isinstance(row, Free):
                frees.append(self._from_start(row.id))
                continue
            # In any order, as in the trace.
            rows += sorted(frees)
            frees.clear()
            rows.append(row.described(self._from_start) if isinstance(row, Entry) else row)
        return [
            *rows,
            *sorted(frees),
            *(self._moved(call, -self.start.row, self._from_start) for call in self.calls),
            *(mark._replace(position=mark.position - self.start.row) for mark in self.marks),
        ]

    def copied(self, number: int) -> Block:
        """A copy that comes so many blocks later."""
        return self._later(number, is_copy=True)

    def renumbered(self, number: int) -> Block:
        """The same allocations, so many blocks later."""
        return self._later(number, is_copy=False)

    def _later(self, number: int, *, is_copy: bool) -> Block:
        size = self.size

        def moved(id_: int) -> int:
            return id_ + number * (size.temporary if id_ >= FIRST_TEMPORARY else size.entry)

        rows: list[Row | list[Row]] = []
        for row in self.rows:
            if isinstance(row, Free):
                rows.append(Free(moved(row.id)))
            elif isinstance(row, Entry) and row.id is not None:
                if is_copy:
                    rows.append(row.copied(moved(row.id)))
                else:
                    row.id = moved(row.id)
                    rows.append(row)
            else:
                rows.append(row)
        offset = number * size.row
        return replace(
            self,
            rows=rows,
            calls=[self._moved(call, offset, moved) for call in self.calls],
            marks=[mark._replace(position=mark.position + offset) for mark in self.marks],
        )

    def _from_start(self, id_: int) -> int:
        return id_ - (self.start.temporary if id_ >= FIRST_TEMPORARY else self.start.entry)

    @staticmethod
    def _moved(call: KernelCall, offset: int, renumber: Callable[[int], int]) -> KernelCall:
        return replace(
            call,
            start=call.start + offset,
            stop=call.stop + offset,
            outputs=tuple(None if id_ is None else renumber(id_) for id_ in call.outputs),
            handles=tuple(map(renumber, call.handles)),
        )
