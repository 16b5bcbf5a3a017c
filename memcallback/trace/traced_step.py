"""TracedStep: the trace of a step at one batch size, and the same events with other sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, count

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Event,
    Free,
    ModuleMark,
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
from memcallback.trace.growth import Growth

Item = Event | KernelCall
#: Later repetitions that are written for an estimate, at most.
NUM_ESTIMATED = 24
#: The hint for a wrong batch size.
SAMPLES = "Give how many samples the batch has."


@dataclass(frozen=True)
class TracedStep:
    """A step as it was traced at one batch size.

    Attributes:
        trace: Its events; the allocator is not asked for allocations of 0 bytes.
        batch_size: Samples in the batch, at least 1.
        calls: The calls of operators that have a rule, in order.
        caveats: What was assumed, one sentence each.
        num_flops: Floating-point operations per update, of the operators that PyTorch counts
            (matrix products, convolutions, attention).
        sent_bytes: Bytes that the rank sends to others per update, by the formulas of rings.
        num_batches: Batches per update.
        origins: The id of each allocation of a tensor -> where it comes from.
        modules: The model's modules, the root first; empty if they are not known.
        growths: The parts of it that repeat more often than was traced.
        has_compiled_passes: Whether compiled code runs in a forward or backward pass. Inductor
            writes other code for another batch size.
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
    growths: tuple[Growth, ...] = field(default=(), repr=False)
    has_compiled_passes: bool = False

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, SAMPLES)

    @cached_property
    def items(self) -> list[Item]:
        """The events, with each call in place of its own events."""
        items: list[Item] = []
        position = 0
        for call in self.calls:
            items += [*self.trace.events[position : call.start], call]
            position = call.stop
        items += self.trace.events[position:]
        return items

    @cached_property
    def numbers(self) -> list[int]:
        """All that may depend on the batch size, in order: sizes of tensors, numbers of rules."""
        numbers: list[int] = []
        for item in self.items:
            if isinstance(item, Alloc):
                numbers.append(item.size_bytes)
            elif isinstance(item, KernelCall):
                numbers += [self.allocs[number].size_bytes for number in item.kept]
                numbers += item.rule.numbers
        return numbers

    @cached_property
    def loose(self) -> frozenset[int]:
        """Positions in `numbers` that need not lie on a line or parabola.

        These are the numbers of rules, some of which a rule ignores, and the sizes of outputs that
        rules give (padded rows).
        """
        loose: set[int] = set()
        start = 0
        for item in self.items:
            if isinstance(item, KernelCall):
                rule = item.rule
                sized = {
                    item.outputs[step.index]
                    for step in rule.function(*rule.constants, *rule.numbers)
                    if isinstance(step, AllocOutput) and step.size_bytes is not None
                }
                loose.update(start + i for i, number in enumerate(item.kept) if number in sized)
                start += len(item.kept)
                loose.update(range(start, start + len(rule.numbers)))
                start += len(rule.numbers)
            elif isinstance(item, Alloc):
                start += 1
        return frozenset(loose)

    @cached_property
    def positions_of_sizes(self) -> list[int]:
        """Positions in `numbers` of the sizes of allocations."""
        positions: list[int] = []
        start = 0
        for item in self.items:
            if isinstance(item, KernelCall):
                positions += range(start, start + len(item.kept))
                start += len(item.kept) + len(item.rule.numbers)
            elif isinstance(item, Alloc):
                positions.append(start)
                start += 1
        return positions

    @cached_property
    def allocs(self) -> dict[int, Alloc]:
        """The allocations by their ids."""
        return {event.id: event for event in self.trace.events if isinstance(event, Alloc)}

    @cached_property
    def first_numbers(self) -> list[int]:
        """The position in `numbers` of each item's first number, and of the end."""
        return [0, *accumulate(map(_num_numbers, self.items))]

    @cached_property
    def whole(self) -> AllocationTrace:
        """The trace with the repetitions that were not traced."""
        return self.with_numbers(self.numbers, {}) if self.growths else self.trace

    def growth_bytes(self, numbers: Sequence[int]) -> int:
        """How much more is allocated after the last traced repetition than before it."""
        growth = self.growths[-1]
        sizes: dict[int, int] = {}
        total = 0
        for index, item in enumerate(self.items[: growth.starts[-1]]):
            first = self.first_numbers[index]
            if isinstance(item, Alloc):
                own = {item.id: numbers[first]}
            elif isinstance(item, KernelCall):
                own = {number: numbers[first + place] for place, number in enumerate(item.kept)}
            else:
                own = {}
            sizes |= own
            if index >= growth.starts[-2]:
                total += sum(own.values()) - (sizes[item.id] if isinstance(item, Free) else 0)
        return total

    def thinned(self, most_items: int = 0) -> TracedStep:
        """The same with some of the repetitions, for an estimate in less time.

        Those are `NUM_ESTIMATED` periods, and more up to so many items.
        """
        each = most_items // max(1, len(self.growths))
        growths = tuple(
            growth.thinned(max(NUM_ESTIMATED, each // growth.num_items)) for growth in self.growths
        )
        return replace(self, growths=growths)

    @property
    def num_written(self) -> int:
        """How many repetitions are written, of all parts that repeat."""
        return sum(growth.num_written for growth in self.growths)

    def with_numbers(
        self, numbers: Sequence[int], kernels: dict[tuple[int, ...], Kernel]
    ) -> AllocationTrace:
        """All events and marks with other numbers; `kernels` caches what rules give."""
        writer = _Writer(self, kernels)
        position = 0
        for growth in self.growths:
            writer.write(position, growth.starts[-1], numbers)
            position = growth.starts[-1]
            for number, ahead in enumerate(growth.ahead):
                for place in range(growth.period):
                    block = growth.num_traced + number * growth.period + place
                    source = growth.source(block)
                    start, stop = growth.starts[source : source + 2]
                    writer.write(
                        start,
                        stop,
                        self._grown(numbers, growth, source, ahead),
                        partial(growth.moved, lag=block - source),
                    )
            writer.ended.append(growth)
        writer.write(position, len(self.items), numbers)
        return writer.trace()

    def _grown(
        self, numbers: Sequence[int], growth: Growth, source: int, num_periods: int
    ) -> dict[int, int]:
        """The numbers of a traced repetition, so many periods later, by position."""
        start, stop = (self.first_numbers[growth.starts[source + more]] for more in (0, 1))
        before = self.first_numbers[growth.starts[source - growth.period]]
        return {
            start + place: max(0, last + num_periods * (last - earlier))
            for place, (last, earlier) in enumerate(
                zip(numbers[start:stop], numbers[before : before + stop - start], strict=True)
            )
        }

    @cached_property
    def marks_before(self) -> dict[int, list[ModuleMark]]:
        """The marks before each item that has any, and after the last one."""
        found: dict[int, list[ModuleMark]] = {}
        marks = deque(self.trace.marks)
        for index, position in enumerate(self.positions):
            while marks and marks[0].position <= position:
                found.setdefault(index, []).append(marks.popleft())
        return found

    @cached_property
    def positions(self) -> list[int]:
        """The position in the trace of each item's first event, and of the end."""
        sizes = (
            item.stop - item.start if isinstance(item, KernelCall) else 1 for item in self.items
        )
        return list(accumulate(sizes, initial=0))

    @cached_property
    def kinds(self) -> dict[int, int]:
        """Index of a call -> a number, equal where rules give the same for equal numbers."""
        known: dict[Hashable, int] = {}
        return {
            index: known.setdefault(
                (call.rule.function, call.rule.constants, len(call.outputs)), len(known)
            )
            for index, call in enumerate(self.items)
            if isinstance(call, KernelCall)
        }


class _Writer:
    """Writes the events of a traced step's items, with other numbers and perhaps other ids."""

    def __init__(self, step: TracedStep, kernels: dict[tuple[int, ...], Kernel]) -> None:
        self._step, self._kernels = step, kernels
        #: Parts that repeat, and whose last repetition is written.
        self.ended: list[Growth] = []
        self._events: list[Event] = []
        self._marks: list[ModuleMark] = []
        self._temporaries = count(FIRST_TEMPORARY)

    def trace(self) -> AllocationTrace:
        """What was written."""
        self._mark(len(self._step.items))
        return _unchecked(tuple(self._events), tuple(self._marks))

    def write(
        self,
        start: int,
        stop: int,
        numbers: Sequence[int] | Mapping[int, int],
        moved: Callable[[int], int] | None = None,
    ) -> None:
        """Write the items from `start` to `stop`; `moved` gives the ids of a later repetition."""
        step, events, ended = self._step, self._events, self.ended
        items, first_numbers, marks_before = step.items, step.first_numbers, step.marks_before
        for index in range(start, stop):
            item = items[index]
            if index in marks_before:
                self._mark(index)
            if isinstance(item, KernelCall):
                self._write_call(index, item, numbers, moved)
            elif isinstance(item, Alloc):
                events.append(_resized(item, numbers[first_numbers[index]], moved))
            elif not isinstance(item, Free):
                events.append(item)
            elif moved is not None:
                events.append(Free(moved(item.id)))
            elif ended:
                events += map(Free, self._last(item.id))
            else:
                events.append(item)

    def _last(self, number: int) -> tuple[int, ...]:
        for growth in self.ended:
            if growth.has(number):
                return growth.at_the_end(number)
        return (number,)

    def _mark(self, index: int) -> None:
        for mark in self._step.marks_before.get(index, ()):
            self._marks.append(ModuleMark(len(self._events), *mark[1:]))

    def _write_call(
        self,
        index: int,
        call: KernelCall,
        numbers: Sequence[int] | Mapping[int, int],
        moved: Callable[[int], int] | None,
    ) -> None:
        step = self._step
        allocs, place = step.allocs, step.first_numbers[index]
        kept = {}
        for number in call.kept:
            kept[number] = _resized(allocs[number], numbers[place], moved)
            place += 1
        end = place + len(call.rule.numbers)
        key = (
            (step.kinds[index], *numbers[place:end])
            if isinstance(numbers, list)
            else (step.kinds[index], *map(numbers.__getitem__, range(place, end)))
        )
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = completed(
                call.rule.function(*call.rule.constants, *key[1:]), len(call.outputs)
            )
        _add_events(call, kernel, kept, self._temporaries, self._events)


def _add_events(
    call: KernelCall,
    kernel: Kernel,
    kept: dict[int, Alloc],
    temporaries: Iterator[int],
    events: list[Event],
) -> None:
    """Append the events of a call; takes its allocations out of `kept`."""
    ids: list[int] = []
    for step in kernel:
        if isinstance(step, AllocOutput):
            number = call.outputs[step.index]
            alloc = None if number is None else kept.pop(number, None)
            if alloc is not None:
                size_bytes = step.size_bytes
                events.append(alloc if size_bytes is None else _resized(alloc, size_bytes))
        elif isinstance(step, AllocTemp):
            ids.append(next(temporaries))
            events.append(
                Alloc(
                    ids[-1],
                    step.size_bytes,
                    call.stream,
                    step.category,
                    call.operator,
                    call.module,
                    step.fallback,
                )
            )
        elif isinstance(step, FreeTemp):
            events.append(Free(ids[step.index]))
        elif call.handles:  # OpenBlasHandles
            events.extend(kept.pop(number) for number in call.handles)


def _unchecked(events: tuple[Event, ...], marks: tuple[ModuleMark, ...]) -> AllocationTrace:
    """A trace whose events differ from a checked trace's in sizes alone.

    Checking 100,000 events takes longer than making them.
    """
    trace = object.__new__(AllocationTrace)
    object.__setattr__(trace, "events", events)
    object.__setattr__(trace, "marks", marks)
    return trace


def _resized(alloc: Alloc, size_bytes: int, moved: Callable[[int], int] | None = None) -> Alloc:
    number = alloc.id if moved is None else moved(alloc.id)
    if alloc.size_bytes == size_bytes and alloc.id == number:
        return alloc
    return Alloc(number, size_bytes, *alloc[2:])


def _num_numbers(item: Item) -> int:
    """How many of the numbers that may depend on the batch size an item has."""
    if isinstance(item, KernelCall):
        return len(item.kept) + len(item.rule.numbers)
    return int(isinstance(item, Alloc))
