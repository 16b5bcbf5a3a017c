"""Cuts a trace's last step at module boundaries, for the memory of each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Free,
    ModuleMark,
    PhaseEnd,
    PhaseStart,
    last_step_start,
)
from memcallback.core.module_table import Span, phase_of_span
from memcallback.core.types import Category, Phase
from memcallback.prediction.replayed import LiveAllocation


@dataclass
class StepSpans:
    """The last step of a trace, by module.

    Attributes:
        windows: The spans of each window, in order.
        saved: The activations live at the end of the forward pass; of each one, if there are
            several.
    """

    windows: list[list[Span]] = field(default_factory=list)
    saved: list[LiveAllocation] = field(default_factory=list)

    @property
    def saved_bytes(self) -> Mapping[str, int]:
        """Block bytes of the saved activations, by the module that was running."""
        by_module: Counter[str] = Counter()
        for live in self.saved:
            by_module[live.alloc.module] += live.block_bytes
        return by_module


def last_step(trace: AllocationTrace, block_bytes: Mapping[int, int]) -> StepSpans:
    """Cut the last step of a trace."""
    start = last_step_start(trace.events)
    cutter = _Cutter(block_bytes)
    marks = iter(trace.marks)
    mark = next(marks, None)
    for position, event in enumerate(trace.events):
        while mark is not None and mark.position <= position:
            cutter.module_changes(mark)
            mark = next(marks, None)
        if isinstance(event, Alloc):
            cutter.alloc(event)
        elif isinstance(event, Free):
            cutter.free(event.id)
        elif isinstance(event, PhaseStart):
            if position > start:
                cutter.phase_starts(event.covers or (event.phase,))
        elif isinstance(event, PhaseEnd):
            cutter.phase_ends()
    return cutter.result


class _Cutter:
    """Follows allocated memory and cuts phases into spans at module marks."""

    def __init__(self, block_bytes: Mapping[int, int]) -> None:
        self.result = StepSpans()
        self._block_bytes = block_bytes
        self._allocated = 0
        self._alive: set[int] = set()
        self._activations: dict[int, Alloc] = {}
        self._covers: tuple[Phase, ...] = ()
        self._spans: list[Span] = []
        self._path: tuple[str, ...] = ()
        self._is_backward = False
        self._start = self._peak = 0

    def alloc(self, alloc: Alloc) -> None:
        if alloc.size_bytes:
            self._alive.add(alloc.id)
            self._allocated += self._block_bytes[alloc.id]
            self._peak = max(self._peak, self._allocated)
            if alloc.category is Category.ACTIVATION:
                self._activations[alloc.id] = alloc

    def free(self, number: int) -> None:
        if number in self._alive:
            self._alive.remove(number)
            self._allocated -= self._block_bytes[number]
            self._activations.pop(number, None)

    def phase_starts(self, covers: tuple[Phase, ...]) -> None:
        self._covers, self._spans, self._activations = covers, [], {}
        self._run((), is_backward=False)

    def module_changes(self, mark: ModuleMark) -> None:
        if self._covers:
            self._cut()
            self._run(mark.path, is_backward=mark.is_backward)

    def phase_ends(self) -> None:
        if self._covers:
            self._cut()
            self._forward_ends()
            self.result.windows.append(self._spans)
            self._covers = ()

    def _run(self, path: tuple[str, ...], *, is_backward: bool) -> None:
        if is_backward:
            self._forward_ends()
        self._path, self._is_backward = path, is_backward
        self._start = self._peak = self._allocated

    def _cut(self) -> None:
        phase = phase_of_span(self._covers, is_backward=self._is_backward)
        if phase is not None:
            self._spans.append(Span(phase, self._path, self._start, self._allocated, self._peak))

    def _forward_ends(self) -> None:
        """Record the live activations as those that the forward pass saved.

        Checkpointing makes the like again in the backward pass; those do not count.
        """
        if phase_of_span(self._covers, is_backward=False) is Phase.FORWARD:
            self.result.saved += [
                LiveAllocation(alloc, self._block_bytes[number])
                for number, alloc in self._activations.items()
            ]
        self._activations = {}
