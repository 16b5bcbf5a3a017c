"""Ledger: storages as they appear and disappear."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import torch

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Event,
    Free,
    ModuleMark,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.code_lines import line_here
from memcallback.core.kernel import FIRST_TEMPORARY, AllocationSource, KernelCall, KernelRule
from memcallback.core.tensors import dense_parts
from memcallback.core.types import Category, Phase


class Entry:
    """One allocation, while the trace is being written.

    Attributes:
        id: Its number; None for memory of the host, which is not in the trace.
        size_bytes: What was asked for.
        category: What it is for; None until that is known.
        operator: What asked for it.
        module: The module that was running.
        phase: The phase in which it was allocated.
        node: The number of the autograd node that was running; -1 for none.
        is_freed: Whether it was given back.
        is_truth: Whether it stands for True when it is read.
        is_meta: Whether it is nowhere yet: a tensor of the meta device.
        origin: The tensor that it was allocated for, and by which line; None if no tensor stands
            for it.
        stream: The CUDA stream that was current; 0 is the default one.
    """

    __slots__ = (
        "category",
        "id",
        "is_freed",
        "is_meta",
        "is_truth",
        "module",
        "node",
        "operator",
        "origin",
        "phase",
        "reference",
        "size_bytes",
        "stream",
    )

    def __init__(
        self,
        id_: int | None,
        size_bytes: int,
        category: Category | None,
        operator: str,
        module: str,
        phase: Phase | None,
        stream: int,
    ) -> None:
        self.id = id_
        self.size_bytes = size_bytes
        self.category = category
        self.operator = operator
        self.module = module
        self.phase = phase
        self.stream = stream
        self.node = -1
        self.is_freed = False
        self.is_truth = self.is_meta = False
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
        self.origin: AllocationSource | None = None

    @property
    def is_host(self) -> bool:
        """Whether it is memory of the host."""
        return self.id is None


class Ledger:
    """Writes down storages as they appear and, through weak references, as they vanish.

    Attributes:
        module: The module that is running.
        phase: The phase that is going on, None between phases.
        stream: The number of the CUDA stream that is current; 0 is the default one.
        calls: The calls of operators that have a rule.
    """

    def __init__(self) -> None:
        self.module = ""
        self.phase: Phase | None = None
        self.stream = 0
        #: A list is a place for marks that are known only later.
        self._rows: list[Entry | Event | list[Event]] = []
        self._by_storage: dict[int, Entry] = {}
        self._num_entries = 0
        self._num_temporaries = 0
        self._call_start = 0
        self._calls: list[KernelCall] = []
        self._marks: list[ModuleMark] = []

    def find(self, tensor: torch.Tensor) -> Entry | None:
        """The allocation that a dense tensor lies in, None if it is not known."""
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def add(
        self,
        tensor: torch.Tensor,
        category: Category | None,
        operator: str,
        *,
        is_host: bool = False,
        size_bytes: int | None = None,
    ) -> Entry:
        """Write down the storage of a dense tensor as a new allocation, of its own size unless
        another is given.
        """
        storage = tensor.untyped_storage()
        entry = self.take(
            storage.nbytes() if size_bytes is None else size_bytes,
            category,
            operator,
            is_host=is_host,
        )
        if not is_host:
            entry.origin = AllocationSource(
                tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), line_here()
            )
        self._follow(storage, entry)
        return entry

    def take(
        self, size_bytes: int, category: Category | None, operator: str, *, is_host: bool = False
    ) -> Entry:
        """Write down an allocation that no tensor stands for; `give` ends it."""
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
            self._rows.append(entry)
        return entry

    def take_temporary(self, size_bytes: int, category: Category, operator: str) -> Entry:
        """Write down what an operator takes for itself; `give` ends it."""
        entry = Entry(
            FIRST_TEMPORARY + self._num_temporaries,
            size_bytes,
            category,
            operator,
            self.module,
            self.phase,
            self.stream,
        )
        self._num_temporaries += 1
        self._rows.append(entry)
        return entry

    def begin_call(self) -> None:
        """What is written down from now on is what one operator does."""
        self._call_start = len(self._rows)

    def end_call(
        self,
        rule: KernelRule,
        outputs: Sequence[Entry | None],
        handles: Sequence[Entry],
        operator: str,
    ) -> None:
        """The operator is done."""
        numbers = tuple(None if entry is None else entry.id for entry in outputs)
        stays = tuple(entry.id for entry in handles if entry.id is not None)
        self._calls.append(
            KernelCall(
                self._call_start,
                len(self._rows),
                rule,
                numbers,
                stays,
                operator,
                self.module,
                self.stream,
            )
        )

    def give(self, entry: Entry) -> None:
        """Write down that an allocation was given back."""
        if entry.id is not None and not entry.is_freed:
            self._rows.append(Free(entry.id))
        entry.is_freed = True

    def move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Let the storage of `new` stand for the allocation of `old` from now on, as if it had been
        written in place.
        """
        entry = self._by_storage.pop(old.untyped_storage()._cdata)
        self._follow(new.untyped_storage(), entry)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Write down that a storage was resized: a new allocation, and the old one is given back."""
        old = self._by_storage.pop(storage._cdata)
        self._follow(
            storage, self.take(storage.nbytes(), old.category, old.operator, is_host=old.is_host)
        )
        self.give(old)

    def label(self, tensors: Iterable[tuple[str, torch.Tensor]], category: Category) -> None:
        """Say what the storages of some tensors are for, and whose module's they are, once that is
        known.
        """
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
        """A phase begins."""
        self.phase = phase
        self._rows.append(PhaseStart(phase))

    def end_phase(self) -> None:
        """The phase is over. What it allocated and still stands is an activation if it was the
        forward pass.
        """
        assert self.phase is not None
        self.label_activations()
        self._rows.append(PhaseEnd(self.phase))
        self.phase = None

    def label_activations(self) -> None:
        """What the forward pass allocated and still stands is an activation, unless something
        better is known.
        """
        for entry in self._by_storage.values():
            if entry.category is None and entry.phase is Phase.FORWARD:
                entry.category = Category.ACTIVATION

    def place(self) -> list[Event]:
        """A place for marks that are known only later, to be filled with them before the trace is
        asked for.
        """
        marks: list[Event] = []
        self._rows.append(marks)
        return marks

    def mark(self, path: tuple[str, ...], *, is_backward: bool) -> None:
        """From here on other modules run."""
        self._marks.append(ModuleMark(len(self._rows), path, is_backward))

    def start_step(self) -> None:
        """A step begins."""
        self._rows.append(StepStart())

    def end_step(self) -> None:
        """The step is over."""
        self._rows.append(StepEnd())

    def close(self) -> None:
        """Write down nothing more: what vanishes from now on stands at the end of the trace."""
        self._by_storage.clear()

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """The calls of operators that have a rule, by the positions of their events in the trace."""
        if not any(isinstance(row, list) for row in self._rows):
            return tuple(self._calls)
        starts = self._starts()
        return tuple(
            replace(call, start=starts[call.start], stop=starts[call.stop]) for call in self._calls
        )

    @property
    def origins(self) -> dict[int, AllocationSource]:
        """The number of each allocation that a tensor stands for -> where it comes from."""
        entries = (row for row in self._rows if isinstance(row, Entry))
        return {
            entry.id: entry.origin
            for entry in entries
            if entry.id is not None and entry.origin is not None
        }

    def _starts(self) -> list[int]:
        """The position in the trace of each row's first event, and where the trace ends."""
        return list(
            accumulate((len(row) if isinstance(row, list) else 1 for row in self._rows), initial=0)
        )

    def trace(self) -> AllocationTrace:
        """All that was written down; what no category was found for is temporary.

        What is freed with nothing in between, while the same modules run, is in the order of its
        numbers: autocast drops its copies in another order each time, which no allocator can tell.
        """
        inside = {position for call in self._calls for position in range(call.start, call.stop)}
        marked = [mark.position for mark in self._marks]

        def group(numbered: tuple[int, Entry | Event | list[Event]]) -> int | None:
            """None for what keeps its place."""
            position, row = numbered
            return (
                bisect.bisect_right(marked, position)
                if isinstance(row, Free) and position not in inside
                else None
            )

        events: list[Event] = []
        for number, rows in groupby(enumerate(self._rows), group):
            found = [event for _, row in rows for event in _events(row)]
            events += (
                found
                if number is None
                else sorted(found, key=lambda event: event.id if isinstance(event, Free) else 0)
            )
        starts = self._starts()
        return AllocationTrace(
            tuple(events),
            tuple(mark._replace(position=starts[mark.position]) for mark in self._marks),
        )

    def _follow(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        key = storage._cdata
        self._by_storage[key] = entry
        entry.reference = weakref.ref(storage, lambda _: self._vanished(key, entry))

    def _vanished(self, key: int, entry: Entry) -> None:
        if self._by_storage.get(key) is entry:
            del self._by_storage[key]
            self.give(entry)


def _events(row: Entry | Event | list[Event]) -> list[Event]:
    if isinstance(row, list):
        return row
    return [_event(row) if isinstance(row, Entry) else row]


def _event(entry: Entry) -> Alloc:
    assert entry.id is not None
    return Alloc(
        entry.id,
        entry.size_bytes,
        entry.stream,
        entry.category or Category.TEMPORARY,
        entry.operator,
        entry.module,
    )
