"""`BatchTrace`: a step's allocations at any batch size, from traces at two of them and a check at a third.

The size of every tensor in a step's trace is a straight line over the batch size, a + b * batch size, as long as the program takes the same
path at every size. What an operator takes for itself follows from the sizes of its tensors, by its own rule (`KernelRule`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from memcallback.checks import whole_number
from memcallback.code_lines import CodeLine
from memcallback.events import Alloc, AllocationTrace, Event, Free, ModuleMark, PhaseEnd, PhaseStart
from memcallback.kernels import Give, Kernel, KernelRule, Make, Take, completed
from memcallback.module_memory import ModuleInfo

#: The number of the first allocation that an operator makes for itself; those of tensors are below it.
FIRST_TEMPORARY = 1 << 40
#: What to give for a batch size.
SAMPLES = "Give how many samples the batch has."
#: A batch size so many times the largest that was traced is far from it.
_FAR = 64


class BatchDependentPath(ValueError):
    """The program does something else at another batch size, so that two traces do not tell of a third."""


class UnknownBatchSize(ValueError):
    """The trace knows only its own batch size, and another one was asked for."""


@dataclass(frozen=True)
class KernelCall:
    """The call of an operator whose allocations follow a rule.

    Attributes:
        start: The position of its first event in the trace.
        stop: The position after its last event.
        rule: What it does.
        outputs: The number of the `Alloc` of each tensor that it returns; None for one that it does not make.
        handles: The numbers of allocations that it makes besides, and that stay (the workspace of a library).
        operator: Its name.
        module: The module that was running.
        stream: The CUDA stream that was current; 0 is the default one.
    """

    start: int
    stop: int
    rule: KernelRule
    outputs: tuple[int | None, ...]
    handles: tuple[int, ...]
    operator: str
    module: str
    stream: int = 0

    @cached_property
    def made(self) -> tuple[int, ...]:
        """The numbers of what it makes and keeps, each once."""
        return tuple(dict.fromkeys((*(number for number in self.outputs if number is not None), *self.handles)))


@dataclass(frozen=True)
class Origin:
    """Where an allocation comes from.

    Attributes:
        shape: That of the tensor for which it was made.
        dtype: Its type, such as `float32`.
        line: The line of the program that made it; None if none is known.
    """

    shape: tuple[int, ...]
    dtype: str
    line: CodeLine | None


@dataclass(frozen=True)
class TracedStep:
    """A step as it was traced at one batch size.

    Attributes:
        trace: Its events. An allocation of 0 bytes is one that no allocator is asked for.
        batch_size: Samples in the batch, at least 1.
        calls: The calls of operators that have a rule, in order.
        caveats: What was assumed, one sentence each.
        num_flops: Floating-point operations from one update to the next, of the operators that PyTorch counts (matrix products,
            convolutions, attention).
        sent_bytes: What the rank sends to others from one update to the next, by the formulas of rings.
        num_batches: How many batches those are.
        origins: The number of each allocation that a tensor stands for -> where it comes from.
        modules: The model's modules, the root first; none if they are not known.
    """

    trace: AllocationTrace
    batch_size: int
    calls: tuple[KernelCall, ...] = ()
    caveats: tuple[str, ...] = ()
    num_flops: int = 0
    sent_bytes: int = 0
    num_batches: int = 1
    origins: Mapping[int, Origin] = field(default_factory=dict, repr=False, compare=False)
    modules: tuple[ModuleInfo, ...] = ()

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
        """All that may depend on the batch size, in order: the sizes of tensors, the numbers of rules."""
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

        These are the numbers of rules, which do not look at all of them, and the sizes of outputs that rules give: rows that are padded.
        """
        found: set[int] = set()
        start = 0
        for item in self.items:
            if isinstance(item, KernelCall):
                made, rule = item.made, item.rule
                kernel = rule.function(*rule.constants, *rule.numbers)
                sized = {item.outputs[step.index] for step in kernel if isinstance(step, Make) and step.size_bytes is not None}
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

    def with_numbers(self, numbers: Sequence[int], answers: dict[tuple[int, ...], Kernel]) -> AllocationTrace:
        """The same events and marks with other sizes.

        Args:
            numbers: In place of `numbers`.
            answers: What the rules of this step have answered before; more is added.
        """
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
                made = {number: _resized(self._allocs[number], size) for number, size in zip(item.made, numbers[index:first], strict=True)}
                index = first + len(item.rule.numbers)
                asked = next(kinds), *numbers[first:index]
                kernel = answers.get(asked)
                if kernel is None:
                    kernel = answers[asked] = completed(item.rule.function(*item.rule.constants, *asked[1:]), len(item.outputs))
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
        return [known.setdefault((call.rule.function, call.rule.constants, len(call.outputs)), len(known)) for call in self.calls]


@dataclass(frozen=True, eq=False)
class BatchTrace:
    """A step's allocations as a function of the batch size.

    Attributes:
        traced: The step as it was traced at the smaller of the batch sizes.
        slopes: What each of its `numbers` grows with each sample; None if only the traced batch size is known.
        caveats: What was assumed, one sentence each.
        base: In place of its `numbers`, those of the same step at another sequence length; None for its own.
        largest_traced: The largest batch size that was traced and agrees; None for that of `traced`.
        shape_slopes: What the dimensions of tensors grow with each sample, by the number of their allocations, where any grows.
    """

    traced: TracedStep
    slopes: tuple[int, ...] | None = None
    caveats: tuple[str, ...] = ()
    base: tuple[int, ...] | None = None
    largest_traced: int | None = None
    shape_slopes: Mapping[int, tuple[float, ...]] = field(default_factory=dict, repr=False)
    #: Answers of rules: a batch size is asked for more than once, and many operators ask the same.
    _answers: dict[tuple[int, ...], Kernel] = field(default_factory=dict, repr=False)

    @classmethod
    def single(cls, traced: TracedStep) -> BatchTrace:
        """A trace at one batch size, which knows only that."""
        return cls(traced, caveats=traced.caveats)

    @classmethod
    def fit(cls, first: TracedStep, second: TracedStep, check: TracedStep | None = None) -> BatchTrace:
        """Put a line through the sizes at two batch sizes.

        Args:
            first: The step at one batch size.
            second: The same step at another one.
            check: The same step at a third one, which must come out to the byte.

        Raises:
            BatchDependentPath: If the traces differ in more than their sizes, or the sizes are not on a line through whole bytes.
            ValueError: If the batch sizes are the same.
        """
        first, second = sorted((first, second), key=lambda step: step.batch_size)
        num_samples = second.batch_size - first.batch_size
        if num_samples == 0:
            raise ValueError(f"both traces are at batch size {first.batch_size}; two batch sizes tell a line: trace another one")
        for number, (ours, theirs) in enumerate(zip(first.items, second.items, strict=False)):
            if not is_same(ours, theirs):
                raise _path_depends(first, second, number)
        if len(first.items) != len(second.items):
            raise _path_depends(first, second, min(len(first.items), len(second.items)))
        steps = [divmod(more - number, num_samples) for number, more in zip(first.numbers, second.numbers, strict=True)]
        uneven = next((position for position, (_, rest) in enumerate(steps) if rest), None)
        if uneven is not None:
            raise _path_depends(first, second, item_of(first, uneven))
        caveats = dict.fromkeys(first.caveats + second.caveats + (check.caveats if check else ()))
        fitted = cls(
            first,
            tuple(slope for slope, _ in steps),
            tuple(caveats),
            largest_traced=second.batch_size,
            shape_slopes=_shape_slopes(first, second),
        )
        return fitted if check is None else fitted.verified(check)

    def verified(self, check: TracedStep) -> BatchTrace:
        """The same, known to tell of one more batch size.

        Args:
            check: The step traced there.

        Raises:
            BatchDependentPath: If it does not come out to the byte.
        """
        self._reproduce(check)
        return replace(self, largest_traced=max(check.batch_size, self.largest_traced or self.batch_size))

    def is_among_traced(self, batch_size: int) -> bool:
        """Whether a batch size is none beyond those that were traced, to either side."""
        return self.batch_size <= batch_size <= (self.largest_traced or self.batch_size)

    def is_far(self, batch_size: int) -> bool:
        """Whether a batch size is so far beyond the largest that was traced that the program may well take another path there."""
        return batch_size > _FAR * (self.largest_traced or self.batch_size)

    @property
    def batch_size(self) -> int:
        """The batch size that was traced."""
        return self.traced.batch_size

    @property
    def numbers(self) -> Sequence[int]:
        """All that may depend on the batch size, at `batch_size`."""
        return self.traced.numbers if self.base is None else self.base

    @property
    def is_any_batch_size_known(self) -> bool:
        """Whether it can tell of other batch sizes than the traced one."""
        return self.slopes is not None

    @cached_property
    def largest_known(self) -> int | None:
        """The largest batch size at which no size is below nothing; None where none shrinks with the batch."""
        shrinking = (number // -slope for number, slope in zip(self.numbers, self.slopes or (), strict=False) if slope < 0 <= number)
        least = min(shrinking, default=None)
        return None if least is None else self.batch_size + least

    @property
    def grows(self) -> bool:
        """Whether a larger batch needs more of anything."""
        return self.slopes is not None and any(slope > 0 for slope in self.slopes)

    def at(self, batch_size: int) -> AllocationTrace:
        """The trace at a batch size.

        Args:
            batch_size: At least 1.

        Raises:
            UnknownBatchSize: If only one batch size is known, and this is another.
            ValueError: If `batch_size` is below 1, or a size comes out negative.
        """
        batch_size = whole_number("batch_size", batch_size, SAMPLES)
        more = batch_size - self.batch_size
        if not more and self.base is None:
            return self.traced.trace
        if more and self.slopes is None:
            raise UnknownBatchSize(
                f"the step was traced at batch size {self.batch_size} alone, which says nothing of batch size {batch_size}: trace the "
                "step at that size"
            )
        slopes = self.slopes or (0,) * len(self.numbers)
        numbers = [number + more * slope for number, slope in zip(self.numbers, slopes, strict=True)]
        for position in [position for position, number in enumerate(self.traced.numbers) if number >= 0 > numbers[position]]:
            index = item_of(self.traced, position)
            if self.base is not None and isinstance(self.traced.items[index], KernelCall):
                numbers[position] = 0  # a padded shape at another sequence length, at which the operator's rule does not look
                continue
            place = item_text(self.traced, index)
            raise UnknownBatchSize(
                f"at batch size {batch_size} a size of {place} comes to {numbers[position]}: it shrinks with the batch, and was traced too "
                "far from this size. Trace the step nearer to it."
            )
        return self.traced.with_numbers(numbers, self._answers)

    def origin(self, number: int, batch_size: int) -> Origin | None:
        """Where an allocation comes from; None if no tensor stands for it.

        Args:
            number: The number of its `Alloc`.
            batch_size: At which the shape is to be.
        """
        origin, slopes = self.traced.origins.get(number), self.shape_slopes.get(number)
        if origin is None or slopes is None:
            return origin
        more = batch_size - self.batch_size
        return replace(origin, shape=tuple(round(size + more * slope) for size, slope in zip(origin.shape, slopes, strict=True)))

    def _reproduce(self, check: TracedStep) -> None:
        ours, theirs = self.at(check.batch_size).events, check.trace.events
        for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one != other:
                raise _check_fails(check.batch_size, event_text(ours, position), event_text(theirs, position))
        if len(ours) != len(theirs):
            end = min(len(ours), len(theirs))
            raise _check_fails(check.batch_size, event_text(ours, end), event_text(theirs, end))


def _shape_slopes(first: TracedStep, second: TracedStep) -> dict[int, tuple[float, ...]]:
    """What dimensions grow with each sample; a tensor of another number of dimensions is taken to stay as it is."""
    num_samples = second.batch_size - first.batch_size
    found = {}
    for number, origin in first.origins.items():
        other = second.origins.get(number)
        if other is not None and origin.shape != other.shape and len(origin.shape) == len(other.shape):
            found[number] = tuple((more - size) / num_samples for size, more in zip(origin.shape, other.shape, strict=True))
    return found


def _play(call: KernelCall, kernel: Kernel, made: dict[int, Alloc], temporaries: Iterator[int], events: list[Event]) -> None:
    """Add the events of a call.

    Args:
        call: The call.
        kernel: All that it does.
        made: What it makes and keeps, by number; taken out as it is made.
        temporaries: Numbers for what it gives back.
        events: Where to add.
    """
    taken: list[int] = []
    for step in kernel:
        if isinstance(step, Make):
            alloc = made.pop(call.outputs[step.index], None)  # type: ignore[arg-type]  # None is no key
            if alloc is not None:
                events.append(alloc if step.size_bytes is None else _resized(alloc, step.size_bytes))
        elif isinstance(step, Take):
            taken.append(next(temporaries))
            events.append(Alloc(taken[-1], step.size_bytes, call.stream, step.category, call.operator, call.module))
        elif isinstance(step, Give):
            events.append(Free(taken[step.index]))
        else:  # Multiply
            events.extend(made.pop(number) for number in call.handles)


def _unchecked(events: tuple[Event, ...], marks: tuple[ModuleMark, ...]) -> AllocationTrace:
    """A trace of events that differ from a checked trace's in sizes alone; checking 100,000 events takes longer than making them."""
    trace = object.__new__(AllocationTrace)
    object.__setattr__(trace, "events", events)
    object.__setattr__(trace, "marks", marks)
    return trace


def _resized(alloc: Alloc, size_bytes: int) -> Alloc:
    # Not `replace`, which takes three times as long.
    return (
        alloc if alloc.size_bytes == size_bytes else Alloc(alloc.id, size_bytes, alloc.stream, alloc.category, alloc.operator, alloc.module)
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
            (one.outputs, one.handles, one.operator, one.module) == (other.outputs, other.handles, other.operator, other.module)
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


def _path_depends(first: TracedStep, second: TracedStep, index: int) -> BatchDependentPath:
    return BatchDependentPath(
        f"the step does something else at another batch size: it has {item_text(first, index)} at batch size {first.batch_size}, where it has "
        f"{item_text(second, index)} at batch size {second.batch_size}. Predict each batch size from a trace of its own."
    )


def _check_fails(batch_size: int, ours: str, theirs: str) -> BatchDependentPath:
    return BatchDependentPath(
        f"the step does something else at another batch size: it has {theirs} at batch size {batch_size}, where a straight line through "
        f"two other batch sizes gives {ours}. Predict each batch size from a trace of its own."
    )


def item_text(step: TracedStep, index: int) -> str:
    """An item and where it is, in words."""
    if index >= len(step.items):
        return "nothing"
    item = step.items[index]
    if isinstance(item, KernelCall):
        return f"a call of {item.operator}{_of_module(item.module)}"
    events = [event for event in step.items[: index + 1] if not isinstance(event, KernelCall)]
    return event_text((*(event for event in step.trace.events if isinstance(event, Alloc)), *events), -1)


def event_text(events: Sequence[Event], position: int) -> str:
    """An event and where it is, in words."""
    if position >= len(events):
        return "nothing"
    event = events[position]
    if isinstance(event, (Alloc, Free)):
        alloc = event if isinstance(event, Alloc) else next(one for one in events if isinstance(one, Alloc) and one.id == event.id)
        phase = _phase(events[:position])
        where = f"{alloc.operator or 'an allocation'}{_of_module(alloc.module)}{f' ({phase})' if phase else ''}"
        return f"{where} with {alloc.size_bytes} bytes" if isinstance(event, Alloc) else f"the end of {where}"
    return str(event)


def _of_module(module: str) -> str:
    return f" in module {module!r}" if module else " in the root module"


def _phase(events: Sequence[Event]) -> str | None:
    mark = next((event for event in reversed(events) if isinstance(event, (PhaseStart, PhaseEnd))), None)
    return mark.phase.label if isinstance(mark, PhaseStart) else None
