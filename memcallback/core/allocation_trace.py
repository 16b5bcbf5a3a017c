"""AllocationTrace: the allocs, frees and phase marks of a step, as data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memcallback.core.types import Category, Phase, Stage

#: The `Alloc.stream` of the private pool that all CUDA graphs of compiled code share.
GRAPH_POOL = -1
#: The stream on which these graphs are recorded.
GRAPH_STREAM = -2


@dataclass(frozen=True, slots=True)
class Fallback:
    """What is allocated instead of something that does not fit: the workspaces of other algorithms.

    Attributes:
        function: Gives the sizes to try, in order; 0 if one needs no memory.
        arguments: What it is called with.
    """

    function: Callable[..., tuple[int, ...]]
    arguments: tuple[Hashable, ...]

    def sizes_bytes(self) -> tuple[int, ...]:
        """The sizes to try, in order."""
        return self.function(*self.arguments)


class _AllocFields(NamedTuple):
    id: int
    size_bytes: int
    stream: int = 0
    category: Category | None = None
    operator: str = ""
    module: str = ""
    fallback: Fallback | None = None


class Alloc(_AllocFields):
    """A storage of device memory is allocated.

    A tuple, since a search for a batch size makes millions of them, and a frozen dataclass takes
    three times as long to make.

    Attributes:
        id: Its number, used by one allocation only in the whole trace.
        size_bytes: The requested size, before rounding; 0 for an empty tensor, which needs no
            memory.
        stream: The CUDA stream it belongs to; 0 is the default stream, `GRAPH_POOL` the pool of
            CUDA graphs.
        category: What it is for; None if unknown.
        operator: The operator that allocated it, such as `aten::convolution`; empty if unknown.
        module: The fully qualified name of the module that was running; the root is "".
        fallback: What is tried if it does not fit; None if the program then fails.
    """

    __slots__ = ()

    def __new__(
        cls,
        id: int,
        size_bytes: int,
        stream: int = 0,
        category: Category | None = None,
        operator: str = "",
        module: str = "",
        fallback: Fallback | None = None,
    ) -> Alloc:
        if size_bytes < 0:
            raise ValueError(
                f"allocation {id} has size_bytes={size_bytes}; a size is 0 or more "
                "bytes: give the size of the storage"
            )
        return tuple.__new__(cls, (id, size_bytes, stream, category, operator, module, fallback))


@dataclass(frozen=True, slots=True)
class Free:
    """The storage of an earlier `Alloc` is freed.

    Attributes:
        id: The number of that `Alloc`.
    """

    id: int


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """The allocator releases its free segments, but for those of `GRAPH_POOL`."""


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """A phase begins.

    Attributes:
        phase: The phase.
        covers: All phases in it, if nothing marks the boundaries between them; empty for the phase
            alone.
    """

    phase: Phase
    covers: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """The current phase ends.

    Attributes:
        phase: The phase.
    """

    phase: Phase


@dataclass(frozen=True, slots=True)
class StepStart:
    """A step begins: one call of the loop's body with one batch.

    Attributes:
        stage: The kind of run that it is a step of, such as a training.
        batch_size: Samples in its batch, if that is not the batch of the trace.
    """

    stage: Stage = Stage.TRAINING
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The current step ends."""


Event = Alloc | Free | EmptyCache | PhaseStart | PhaseEnd | StepStart | StepEnd


class ModuleMark(NamedTuple):
    """Other modules begin to run.

    Attributes:
        position: The position of the first event, or the number of the first reading, with them.
        path: The FQNs of the running modules, outermost first; empty if no module runs.
        is_backward: Whether their part of a backward pass runs.
    """

    position: int
    path: tuple[str, ...]
    is_backward: bool = False


@dataclass(frozen=True)
class AllocationTrace:
    """The allocator calls of a training, with its steps and phases, in order.

    A trace for a prediction begins with the model. Its first step starts without gradients and
    optimizer state, and its last one is steady.

    Addresses, rounding and reserved memory are not in it: an allocator decides them. Nor is memory
    that a stream uses after another has freed it (`Tensor.record_stream`): when it is returned
    depends on time.

    Attributes:
        events: The events. Every `Free` has an earlier `Alloc`, no number is used twice, phases do
            not overlap, nor do steps, and no phase crosses the boundary of a step.
        marks: Where modules begin to run, in order; empty if unknown. No module runs when a phase
            begins.
    """

    events: tuple[Event, ...]
    marks: tuple[ModuleMark, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.events)

    def __repr__(self) -> str:
        return f"<AllocationTrace: {len(self.events):,} events>"


def first_step_start(events: Sequence[Event]) -> int:
    """The position of the first step's start; 0 where no step starts."""
    starts = (number for number, event in enumerate(events) if isinstance(event, StepStart))
    return next(starts, 0)


def first_step_end(events: Sequence[Event]) -> int:
    """The position after the first step's end; that of the last event where no step ends."""
    ends = (number for number, event in enumerate(events, 1) if isinstance(event, StepEnd))
    return next(ends, len(events))


def last_step_start(events: Sequence[Event]) -> int:
    """The position of the last step's start; 0 where no step starts."""
    starts = (number for number, event in enumerate(events) if isinstance(event, StepStart))
    return max(starts, default=0)


def phase_events(events: Sequence[Event], phase: Phase) -> Iterator[Sequence[Event]]:
    """The events of each run of a phase, in order, without its marks."""
    start = None
    for position, event in enumerate(events):
        if isinstance(event, PhaseStart) and event.phase is phase:
            start = position + 1
        elif isinstance(event, PhaseEnd) and start is not None:
            yield events[start:position]
            start = None


def allocated_in(phase: Phase, events: Iterable[Event]) -> Iterator[Alloc]:
    """All that is allocated in a phase, in order; also in windows that cover others too."""
    is_inside = False
    for event in events:
        if isinstance(event, Alloc):
            if is_inside:
                yield event
        elif isinstance(event, PhaseStart):
            is_inside = phase in (event.phase, *event.covers)
        elif isinstance(event, PhaseEnd):
            is_inside = False


def not_freed(events: Iterable[Event]) -> list[Alloc]:
    """The allocations in some events that none of these events frees, in order."""
    live: dict[int, Alloc] = {}
    for event in events:
        if isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            live.pop(event.id, None)
    return list(live.values())


def _check(events: Sequence[Event]) -> None:
    """Raise ValueError at the first event that cannot follow those before it."""
    seen: set[int] = set()
    alive: set[int] = set()
    phases: list[Phase] = []
    in_step = False
    for position, event in enumerate(events):
        if isinstance(event, Alloc):
            if event.id in seen:
                raise ValueError(
                    f"event {position} allocates id {event.id} a second time; an id belongs to one "
                    "allocation: give each allocation its own"
                )
            seen.add(event.id)
            alive.add(event.id)
        elif isinstance(event, Free):
            if event.id not in alive:
                reason = "is freed already" if event.id in seen else "was never allocated"
                raise ValueError(
                    f"event {position} frees id {event.id}, which {reason}; each Alloc is freed at "
                    "most once, by a later Free: leave this Free out"
                )
            alive.remove(event.id)
        elif isinstance(event, (StepStart, StepEnd)):
            if phases or in_step is isinstance(event, StepStart):
                where = "inside a step" if in_step else "without an open step"
                if phases:
                    where = f"inside phase {phases[0].value!r}"
                raise ValueError(
                    f"event {position} is a {type(event).__name__} {where}; steps contain whole "
                    "phases and do not overlap: put a step's marks between phases"
                )
            in_step = not in_step
        elif not isinstance(event, EmptyCache):
            _check_mark(position, event, phases)
    if in_step:
        raise ValueError("a step has a start and no end; every step has both: append StepEnd()")
    if phases:
        raise ValueError(
            f"phase {phases[0].value!r} has a start and no end; every phase has both: append "
            f"PhaseEnd({phases[0]})"
        )


def _check_mark(position: int, mark: PhaseStart | PhaseEnd, phases: list[Phase]) -> None:
    """Check a phase mark, and keep the current phase, if any, in `phases`."""
    current = phases[0].value if phases else None
    if isinstance(mark, PhaseStart):
        if phases:
            raise ValueError(
                f"event {position} starts phase {mark.phase.value!r} inside {current!r}; phases do "
                "not overlap: end the other first"
            )
        phases.append(mark.phase)
    elif phases != [mark.phase]:
        raise ValueError(
            f"event {position} ends phase {mark.phase.value!r}, but the current phase is "
            f"{current!r}: put a PhaseStart for {mark.phase.value!r} before it"
        )
    else:
        phases.clear()
