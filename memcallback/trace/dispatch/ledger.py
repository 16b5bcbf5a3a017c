"""Ledger: the allocations of a trace, as storages appear and disappear."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path

import torch

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    EmptyCache,
    Event,
    Fallback,
    Free,
    ModuleMark,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.code_lines import lines_inside
from memcallback.core.kernel import FIRST_TEMPORARY, AllocationSource, KernelCall, KernelRule
from memcallback.core.tensors import dense_parts
from memcallback.core.torch_private import storage_id
from memcallback.core.types import Category, Phase, Stage
from memcallback.core.visible import visible_name
from memcallback.trace.dispatch.blocks import Block, Position, Row
from memcallback.trace.dispatch.entries import Entry

#: Frames of the tracer and those that called it are not the step's.
TRACER = str(Path(__file__).parents[1] / "tracer.py")


class Ledger:
    """Records storages as they appear and, through weak references, as they disappear.

    Attributes:
        module: The module that is running.
        phase: The current phase, None between phases.
        stream: The number of the current CUDA stream; 0 is the default one.
        calls: The calls of operators that have a rule.
    """

    def __init__(self) -> None:
        self.module = ""
        self.phase: Phase | None = None
        self.stream = 0
        #: A list is filled later, with what is not known yet.
        self._rows: list[Row | list[Row]] = []
        #: The list that allocations go to; None for the end of the rows.
        self._place: list[Row] | None = None
        self._by_storage: dict[int, Entry] = {}
        self._num_entries = 0
        self._num_temporaries = 0
        self._call_start = 0
        self._calls: list[KernelCall] = []
        self._marks: list[ModuleMark] = []
        self._cuts: list[int] = []

    def find(self, tensor: torch.Tensor) -> Entry | None:
        """The allocation of a dense tensor, None for an unknown one."""
        return self._by_storage.get(storage_id(tensor.untyped_storage()))

    def add(
        self,
        tensor: torch.Tensor,
        category: Category | None,
        operator: str,
        *,
        is_host: bool = False,
        size_bytes: int | None = None,
    ) -> Entry:
        """Record the storage of a dense tensor as a new allocation."""
        storage = tensor.untyped_storage()
        entry = self.alloc(
            storage.nbytes() if size_bytes is None else size_bytes,
            category,
            operator,
            is_host=is_host,
        )
        if not is_host:
            entry.origin = AllocationSource(
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                *lines_inside(TRACER),
            )
        self._follow(storage, entry)
        return entry

    def share(self, tensor: torch.Tensor, entry: Entry) -> None:
        """Record that a dense tensor lies in an allocation, too, which lasts at least as long."""
        self._by_storage[storage_id(tensor.untyped_storage())] = entry

    def alloc(
        self, size_bytes: int, category: Category | None, operator: str, *, is_host: bool = False
    ) -> Entry:
        """Record an allocation without a tensor; `free` ends it."""
        entry = Entry(
            None if is_host else self._num_entries,
            size_bytes,
            category,
            operator,
            self.module,
            self.phase,
            self.stream,
        )
        if not is_host:
            self._num_entries += 1
            (self._rows if self._place is None else self._place).append(entry)
        return entry

    def alloc_temp(
        self,
        size_bytes: int,
        category: Category,
        operator: str,
        fallback: Fallback | None = None,
    ) -> Entry:
        """Record a temporary of an operator; `free` ends it."""
        entry = Entry(
            FIRST_TEMPORARY + self._num_temporaries,
            size_bytes,
            category,
            operator,
            self.module,
            self.phase,
            self.stream,
        )
        entry.fallback = fallback
        self._num_temporaries += 1
        self._rows.append(entry)
        return entry

    def begin_call(self) -> None:
        """Begin the call of an operator, whose events follow."""
        self._call_start = len(self._rows)

    def end_call(
        self,
        rule: KernelRule,
        outputs: Sequence[Entry | None],
        handles: Sequence[Entry],
        operator: str,
    ) -> None:
        """End the call of an operator."""
        output_ids = tuple(None if entry is None else entry.id for entry in outputs)
        handle_ids = tuple(entry.id for entry in handles if entry.id is not None)
        self._calls.append(
            KernelCall(
                self._call_start,
                len(self._rows),
                rule,
                output_ids,
                handle_ids,
                operator,
                visible_name(self.module),
                self.stream,
            )
        )

    def free(self, entry: Entry) -> None:
        """Record that an allocation was freed."""
        if entry.id is not None and not entry.is_freed:
            self._rows.append(Free(entry.id))
        entry.is_freed = True

    def empty_cache(self) -> None:
        """Record that the allocator releases its free segments."""
        self._rows.append(EmptyCache())

    def move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Give the allocation of `old` to the storage of `new`, as if it was written in place."""
        entry = self._by_storage.pop(storage_id(old.untyped_storage()))
        self._follow(new.untyped_storage(), entry)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Record a resized storage: a new allocation, then the old one is freed.

        Other storages are those that PyTorch itself resizes, as it makes the fake of a constant.
        """
        old = self._by_storage.pop(storage_id(storage), None)
        if old is None:
            return
        self._follow(
            storage, self.alloc(storage.nbytes(), old.category, old.operator, is_host=old.is_host)
        )
        self.free(old)

    def replace(self, storage: torch.UntypedStorage, operator: str, node: int) -> None:
        """Record that an operator copies a storage, which is then freed."""
        self.resize(storage)
        if (entry := self._by_storage.get(storage_id(storage))) is not None:
            entry.operator, entry.node = operator, node

    def label(self, tensors: Iterable[tuple[str, torch.Tensor]], category: Category) -> None:
        """Set category and module of tensors' storages, once they are known."""
        for module, tensor in tensors:
            for part in dense_parts(tensor):
                entry = self.find(part)
                if entry is not None and entry.category in (
                    None,
                    Category.TEMPORARY,
                    Category.ACTIVATION,
                ):
                    entry.category, entry.module = category, module

    def start_phase(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase = phase
        self._rows.append(PhaseStart(phase))

    def end_phase(self) -> None:
        """End the phase; what the forward pass allocated and is still live is an activation."""
        assert self.phase is not None
        self.label_activations()
        self._rows.append(PhaseEnd(self.phase))
        self.phase = None

    def label_activations(self) -> None:
        """Label live allocations of the forward pass as activations, if they have no category."""
        for entry in self._by_storage.values():
            if entry.category is None and entry.phase is Phase.FORWARD:
                entry.category = Category.ACTIVATION

    def place(self) -> list[Row]:
        """Reserve a place for what is known later; fill the list before calling `trace`."""
        place: list[Row] = []
        self._rows.append(place)
        return place

    @contextmanager
    def recording_at(self, place: list[Row]) -> Iterator[None]:
        """Record allocations at a place between phases that was reserved earlier."""
        before = self.phase, self.stream
        self._place, self.phase, self.stream = place, None, 0
        try:
            yield
        finally:
            self._place, (self.phase, self.stream) = None, before

    def mark(self, path: tuple[str, ...], *, is_backward: bool) -> None:
        """Note which modules run from here on."""
        self._marks.append(ModuleMark(len(self._rows), path, is_backward))

    def start_step(self, stage: Stage, batch_size: int | None = None) -> None:
        """Begin a step, perhaps with a batch of another size."""
        self._rows.append(StepStart(stage, batch_size))

    def cut(self) -> int:
        """Keep frees before this place apart from those after it; its number."""
        self._cuts.append(len(self._rows))
        return len(self._cuts) - 1

    def cuts(self) -> list[int]:
        """The position in the trace of each place that was cut."""
        starts = self._starts()
        return [starts[row] for row in self._cuts]

    def end_step(self) -> None:
        """End the step."""
        self._rows.append(StepEnd())

    def close(self) -> None:
        """Record nothing more: what disappears from now on is live at the end of the trace."""
        self._by_storage.clear()

    def here(self) -> Position:
        """Where the next row goes, and the numbers that come next."""
        return Position(
            len(self._rows),
            self._num_entries,
            self._num_temporaries,
            len(self._calls),
            len(self._marks),
        )

    def repeat(self, earlier: Position, last: Position, times: int) -> bool:
        """Repeat what was recorded from `last` on if it is the same as what is before, or do not.

        The copies come first, and what was recorded itself is renumbered to be the last of all:
        its tensors may still be alive.
        """
        before, block = self._block(earlier, last), self._block(last, self.here())
        description = block.described()
        if description is None or description != before.described() or before.has_live():
            return False
        del self._rows[last.row :], self._calls[last.call :], self._marks[last.mark :]
        for number in range(times + 1):
            # Last, as the copies are numbered from its own numbers.
            moved = block.copied(number) if number < times else block.renumbered(times)
            self._rows += moved.rows
            self._calls += moved.calls
            self._marks += moved.marks
        self._num_entries += times * block.size.entry
        self._num_temporaries += times * block.size.temporary
        return True

    def _block(self, start: Position, end: Position) -> Block:
        return Block(
            start,
            end,
            self._rows[start.row : end.row],
            self._calls[start.call : end.call],
            self._marks[start.mark : end.mark],
        )

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """The calls of operators that have a rule, with positions in the trace."""
        if not any(isinstance(row, list) for row in self._rows):
            return tuple(self._calls)
        starts = self._starts()
        return tuple(
            replace(call, start=starts[call.start], stop=starts[call.stop]) for call in self._calls
        )

    @property
    def origins(self) -> dict[int, AllocationSource]:
        """Number of an allocation of a tensor -> where it comes from."""
        return {
            row.id: row.origin
            for rows in self._rows
            for row in (rows if isinstance(rows, list) else (rows,))
            if isinstance(row, Entry) and row.id is not None and row.origin is not None
        }

    def _starts(self) -> list[int]:
        """The position in the trace of each row's first event, and of the end."""
        return list(
            accumulate((len(row) if isinstance(row, list) else 1 for row in self._rows), initial=0)
        )

    def trace(self) -> AllocationTrace:
        """The whole trace; an allocation without a category is temporary.

        Consecutive frees, while the same modules run, are sorted by number: autocast drops its
        copies in another order each time, which makes no difference to an allocator.
        """
        inside = {position for call in self._calls for position in range(call.start, call.stop)}
        marked = sorted([*(mark.position for mark in self._marks), *self._cuts])

        def group(numbered: tuple[int, Row | list[Row]]) -> int | None:
            """Number runs of frees that may be sorted; None for other rows."""
            position, row = numbered
            return (
                bisect.bisect_right(marked, position)
                if isinstance(row, Free) and position not in inside
                else None
            )

        events: list[Event] = []
        for number, rows in groupby(enumerate(self._rows), group):
            run = [event for _, row in rows for event in _events(row)]
            if number is not None:
                run.sort(key=lambda event: event.id if isinstance(event, Free) else 0)
            events += run
        starts = self._starts()
        return AllocationTrace(
            tuple(events),
            tuple(mark._replace(position=starts[mark.position]) for mark in self._marks),
        )

    def _follow(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        key = storage_id(storage)
        self._by_storage[key] = entry
        entry.reference = weakref.ref(storage, lambda _: self._vanished(key, entry))

    def _vanished(self, key: int, entry: Entry) -> None:
        if self._by_storage.get(key) is entry:
            del self._by_storage[key]
            self.free(entry)


def _events(row: Row | list[Row]) -> list[Event]:
    rows = row if isinstance(row, list) else [row]
    return [_event(one) if isinstance(one, Entry) else one for one in rows]


def _event(entry: Entry) -> Alloc:
    assert entry.id is not None
    return Alloc(
        entry.id,
        entry.size_bytes,
        entry.stream,
        entry.category or Category.TEMPORARY,
        entry.operator,
        visible_name(entry.module),
        entry.fallback,
    )
