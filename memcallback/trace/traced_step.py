"""TracedStep: the trace of a step at one batch size, and the same with other sizes.

What an operator takes for itself follows from the sizes of its tensors, by its own rule
(`KernelRule`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Event,
    Free,
    ModuleMark,
    PhaseEnd,
    PhaseStart,
)
from memcallback.core.kernel import (
    FIRST_TEMPORARY,
    AllocationSource,
    AllocOutput,
    AllocTemp,
    FreeTemp,
    Kernel,
    KernelCall,
    completed,
)
from memcallback.core.module_table import ModuleInfo
from memcallback.core.validation import whole_number

#: What to give for a batch size.
SAMPLES = "Give how many samples the batch has."


@dataclass(frozen=True)
class TracedStep:
    """A step as it was traced at one batch size.

    Attributes:
        trace: Its events. An allocation of 0 bytes is one that no allocator is asked for.
        batch_size: Samples in the batch, at least 1.
        calls: The calls of operators that have a rule, in order.
        caveats: What was assumed, one sentence each.
        num_flops: Floating-point operations from one update to the next, of the operators that
            PyTorch counts (matrix products, convolutions, attention).
        sent_bytes: What the rank sends to others from one update to the next, by the formulas of
            rings.
        num_batches: How many batches those are.
        origins: The number of each allocation that a tensor stands for -> where it comes from.
        modules: The model's modules, the root first; none if they are not known.
    """

    trace: AllocationTrace
    batch_size: int
    calls: tuple[KernelCall, ...] = field(default=(), repr=False)
    caveats: tuple[str, ...] = ()
    num_flops: int = 0
    sent_bytes: int = 0
    num_batches: int = 1
    origins: Mapping[int, AllocationSource] = field(default_factory=dict, repr=False, compare=False)
    modules: tuple[ModuleInfo, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, SAMPLES)

    @cached_property
    def items(self) -> list[Event | KernelCall]:
        """The events, with a call in place of its own ones."""
        found: list[Event | KernelCall] = []
        position = 0
        for call in self.calls:
            found.extend(self.trace.events[position : call.start])
            found.append(call)
            position = call.stop
        found.extend(self.trace.events[position:])
        return found

    @cached_property
    def numbers(self) -> list[int]:
        """All that may depend on the batch size, in order: the sizes of tensors, the numbers of
        rules.
        """
        found: list[int] = []
        for item in self.items:
            if isinstance(item, Alloc):
                found.append(item.size_bytes)
            elif isinstance(item, KernelCall):
                found.extend(self._allocs[number].size_bytes for number in item.made)
                found.extend(item.rule.numbers)
        return found

    @cached_property
    def loose(self) -> frozenset[int]:
        """Positions in `numbers` of those that need be on no line or parabola.

        These are the numbers of rules, which do not look at all of them, and the sizes of outputs
        that rules give: rows that are padded.
        """
        found: set[int] = set()
        start = 0
        for item in self.items:
            if isinstance(item, KernelCall):
                made, rule = item.made, item.rule
                kernel = rule.function(*rule.constants, *rule.numbers)
                sized = {
                    item.outputs[step.index]
                    for step in kernel
                    if isinstance(step, AllocOutput) and step.size_bytes is not None
                }
                found.update(start + index for index, number in enumerate(made) if number in sized)
                start += len(made)
                found.update(range(start, start + len(rule.numbers)))
                start += len(rule.numbers)
            elif isinstance(item, Alloc):
                start += 1
        return frozenset(found)

    @cached_property
    def _allocs(self) -> dict[int, Alloc]:
        return {event.id: event for event in self.trace.events if isinstance(event, Alloc)}

    def with_numbers(
        self, numbers: Sequence[int], answers: dict[tuple[int, ...], Kernel]
    ) -> AllocationTrace:
        """The same events and marks with other sizes."""
        events: list[Event] = []
        marks, unmoved, position = list[ModuleMark](), deque(self.trace.marks), 0
        kinds, temporaries, index = iter(self._kinds), count(FIRST_TEMPORARY), 0
        for item in self.items:
            while unmoved and unmoved[0].position <= position:
                marks.append(unmoved.popleft()._replace(position=len(events)))
            if isinstance(item, Alloc):
                events.append(_resized(item, numbers[index]))
                position += 1
                index += 1
            elif isinstance(item, KernelCall):
                first = index + len(item.made)
                made = {
                    number: _resized(self._allocs[number], size)
                    for number, size in zip(item.made, numbers[index:first], strict=True)
                }
                index = first + len(item.rule.numbers)
                asked = next(kinds), *numbers[first:index]
                kernel = answers.get(asked)
                if kernel is None:
                    kernel = answers[asked] = completed(
                        item.rule.function(*item.rule.constants, *asked[1:]), len(item.outputs)
                    )
                _play(item, kernel, made, temporaries, events)
                position += item.stop - item.start
            else:
                events.append(item)
                position += 1
        marks += [mark._replace(position=len(events)) for mark in unmoved]
        return _unchecked(tuple(events), tuple(marks))

    @cached_property
    def _kinds(self) -> list[int]:
        """A number for each call, the same for those that get the same answer to the same numbers."""
        known: dict[Hashable, int] = {}
        return [
            known.setdefault(
                (call.rule.function, call.rule.constants, len(call.outputs)), len(known)
            )
            for call in self.calls
        ]


def _play(
    call: KernelCall,
    kernel: Kernel,
    made: dict[int, Alloc],
    temporaries: Iterator[int],
    events: list[Event],
) -> None:
    """Add the events of a call."""
    taken: list[int] = []
    for step in kernel:
        if isinstance(step, AllocOutput):
            alloc = made.pop(call.outputs[step.index], None)  # type: ignore[arg-type]  # None is no key
            if alloc is not None:
                events.append(
                    alloc if step.size_bytes is None else _resized(alloc, step.size_bytes)
                )
        elif isinstance(step, AllocTemp):
            taken.append(next(temporaries))
            events.append(
                Alloc(
                    taken[-1],
                    step.size_bytes,
                    call.stream,
                    step.category,
                    call.operator,
                    call.module,
                )
            )
        elif isinstance(step, FreeTemp):
            events.append(Free(taken[step.index]))
        else:  # Multiply
            events.extend(made.pop(number) for number in call.handles)


def _unchecked(events: tuple[Event, ...], marks: tuple[ModuleMark, ...]) -> AllocationTrace:
    """A trace of events that differ from a checked trace's in sizes alone; checking 100,000 events
    takes longer than making them.
    """
    trace = object.__new__(AllocationTrace)
    object.__setattr__(trace, "events", events)
    object.__setattr__(trace, "marks", marks)
    return trace


def _resized(alloc: Alloc, size_bytes: int) -> Alloc:
    # Not `replace`, which takes three times as long.
    return (
        alloc
        if alloc.size_bytes == size_bytes
        else Alloc(alloc.id, size_bytes, alloc.stream, alloc.category, alloc.operator, alloc.module)
    )


def is_same(one: Event | KernelCall, other: Event | KernelCall) -> bool:
    """Whether two items differ in sizes alone."""
    if isinstance(one, Alloc) and isinstance(other, Alloc):
        return (one.id, one.stream, one.category, one.operator, one.module) == (
            other.id,
            other.stream,
            other.category,
            other.operator,
            other.module,
        )
    if isinstance(one, KernelCall) and isinstance(other, KernelCall):
        ours, theirs = one.rule, other.rule
        return (
            (one.outputs, one.handles, one.operator, one.module)
            == (other.outputs, other.handles, other.operator, other.module)
            and (ours.function, ours.constants) == (theirs.function, theirs.constants)
            and len(ours.numbers) == len(theirs.numbers)
        )
    return one == other


def item_of(step: TracedStep, position: int) -> int:
    """Which item one of the numbers belongs to."""
    for index, item in enumerate(step.items):
        if isinstance(item, Alloc):
            position -= 1
        elif isinstance(item, KernelCall):
            position -= len(item.made) + len(item.rule.numbers)
        if position < 0:
            return index
    raise AssertionError("there are as many numbers as items say")


def item_text(step: TracedStep, index: int) -> str:
    """An item and where it is, in words."""
    if index >= len(step.items):
        return "nothing"
    item = step.items[index]
    if isinstance(item, KernelCall):
        return f"a call of {item.operator}{_of_module(item.module)}"
    events = [event for event in step.items[: index + 1] if not isinstance(event, KernelCall)]
    return event_text(
        (*(event for event in step.trace.events if isinstance(event, Alloc)), *events), -1
    )


def event_text(events: Sequence[Event], position: int) -> str:
    """An event and where it is, in words."""
    if position >= len(events):
        return "nothing"
    event = events[position]
    if isinstance(event, (Alloc, Free)):
        alloc = (
            event
            if isinstance(event, Alloc)
            else next(one for one in events if isinstance(one, Alloc) and one.id == event.id)
        )
        phase = _phase(events[:position])
        where = f"{alloc.operator or 'an allocation'}{_of_module(alloc.module)}{f' ({phase})' if phase else ''}"
        return (
            f"{where} with {alloc.size_bytes} bytes"
            if isinstance(event, Alloc)
            else f"the end of {where}"
        )
    return str(event)


def _of_module(module: str) -> str:
    return f" in module {module!r}" if module else " in the root module"


def _phase(events: Sequence[Event]) -> str | None:
    mark = next(
        (event for event in reversed(events) if isinstance(event, (PhaseStart, PhaseEnd))), None
    )
    return mark.phase.label if isinstance(mark, PhaseStart) else None
