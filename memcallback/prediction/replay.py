"""replay(): plays the allocations of a trace on a simulated allocator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Generic, Protocol, TypeVar

from memcallback.core.allocation_trace import (
    Alloc,
    EmptyCache,
    Event,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
    first_step_end,
    first_step_start,
    not_freed,
)
from memcallback.core.step_memory import MemoryStats, PhaseMemory, largest
from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Phase, Stage
from memcallback.devices.catalogue import Device, HostSpec
from memcallback.prediction.allocator.at_start import Segment, placed
from memcallback.prediction.allocator.caching import CachingAllocator, OutOfMemoryError
from memcallback.prediction.allocator.host import HostAllocator
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.fallbacks import KeptPlans
from memcallback.prediction.replayed import Replay, ReplayedStep
from memcallback.prediction.steady_state import (
    MAX_WINDOWS,
    Peaks,
    Window,
    growth,
    last_windows,
    pairs_of,
    unsettled,
)


class Block(Protocol):
    """What an allocator hands out."""

    @property
    def size_bytes(self) -> int:
        """Including rounding, and a tail that is not split off."""


_Block = TypeVar("_Block", bound=Block)


class Allocator(Protocol[_Block]):
    """A simulated allocator that can replay a trace."""

    allocated_bytes: int
    num_alloc_retries: int

    def allocate(self, size_bytes: int, stream: int = 0) -> _Block:
        """Hand out a block of at least 1 byte, or raise OutOfMemoryError."""

    def free(self, block: _Block) -> None:
        """Take a block back."""

    def empty_cache(self) -> None:
        """Release what is free."""

    def stats(self) -> MemoryStats:
        """Memory now, with the peaks since `reset_peaks`."""

    def reset_peaks(self) -> None:
        """Restart the peaks at the present values."""


def replay(
    events: Sequence[Event],
    allocator: Allocator[_Block],
    *,
    unlimited: bool = False,
    known: Mapping[int, _Block] | None = None,
) -> Replay:
    """Replay a trace, and repeat its last window until the allocator settles.

    `known` are the blocks that the allocator has before the first step, by the id of the allocation
    that would have made them.
    """
    replayer = _Replayer(events, allocator, unlimited=unlimited, known=known or {})
    with suppress(OutOfMemoryError):
        replayer.run()
    replayer.result.num_alloc_retries = allocator.num_alloc_retries
    return replayer.result


def replay_on(
    events: Sequence[Event],
    device: Device,
    settings: AllocatorSettings,
    capacity_bytes: int | None,
    at_start: Sequence[Segment] = (),
) -> Replay:
    """Replay a trace on a device's allocator; a capacity of None is unlimited memory.

    `at_start` is what the allocator has before the first step, the model included.
    """
    unlimited = capacity_bytes is None
    if isinstance(device, HostSpec):
        return replay(events, HostAllocator(capacity_bytes=capacity_bytes), unlimited=unlimited)
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    known = allocator.adopt(placed(at_start, events))
    return replay(events, allocator, unlimited=unlimited, known=known)


class _Replayer(Generic[_Block]):
    """The state of a replay."""

    def __init__(
        self,
        events: Sequence[Event],
        allocator: Allocator[_Block],
        *,
        unlimited: bool,
        known: Mapping[int, _Block],
    ) -> None:
        self.events = events
        self.known = known
        self.allocator = allocator
        self.unlimited = unlimited
        self.result = Replay()
        #: Live blocks by the id of their allocation.
        self.alive: dict[int, _Block] = {}
        #: Live allocations of persistent categories.
        self.holders: dict[int, Alloc] = {}
        self.held: dict[Category, int] = dict.fromkeys(PERSISTENT_CATEGORIES, 0)
        self.windows: list[PhaseMemory] = []
        self.phase: Phase | None = None
        self.covers: tuple[Phase, ...] = ()
        self.start = MemoryStats()
        self.num_steps = 0
        self.has_updated = False
        self.is_warm_up = True
        #: What the last step is a step of; at first no step was.
        self.stage: Stage | None = None
        self.batch_size: int | None = None
        self.peak = (-1, -1)
        self.plans = KeptPlans()

    def run(self) -> None:
        """Replay all events; an OutOfMemoryError is noted in the result and raised."""
        position = self.begin()
        for window in last_windows(self.events):
            self.play(position, window.start)
            before, num_earlier = list(self.alive), len(self.result.steps)
            self.play(window.start, window.stop)
            freed, left = (
                self.latest(set(before) - self.alive.keys(), window),
                self.latest(self.alive.keys() - set(before), window),
            )
            pairs = pairs_of(freed, left)
            if pairs is None:
                self.result.caveats += growth(window, freed, left)
            else:
                self.repeat(window, pairs, num_earlier)
            position = window.stop
        self.play(position, len(self.events))

    def begin(self) -> int:
        """Replay to the first step, and past the blocks that are there then; where that is."""
        start = first_step_start(self.events)
        if not self.known:
            self.play(0, start)
            return start
        there = {alloc.id for alloc in not_freed(self.events[:start])}
        for place, event in enumerate(self.events[:start]):
            if isinstance(event, Alloc) and event.id in self.known:
                self.hold(event)
            elif isinstance(event, Alloc) and event.id not in there and not event.stream:
                # It was freed: what it left behind in the default stream is among the known.
                if event.size_bytes:
                    self.result.block_bytes[event.id] = 0
            elif isinstance(event, Alloc | Free):
                self.play(place, place + 1)
        position = start
        for place, event in enumerate(self.events[start : first_step_end(self.events)], start):
            if isinstance(event, Alloc) and event.id in self.known:
                self.play(position, place)
                self.hold(event)
                position = place + 1
        return position

    def hold(self, alloc: Alloc) -> None:
        """Note an allocation that is there already."""
        block = self.known[alloc.id]
        self.alive[alloc.id] = block
        self.result.block_bytes[alloc.id] = block.size_bytes
        if alloc.category in self.held:
            self.holders[alloc.id] = alloc
            self.held[alloc.category] += alloc.size_bytes

    def repeat(self, window: Window, pairs: Sequence[tuple[int, int]], num_earlier: int) -> None:
        """Replay the window until two repetitions are equal; keep the steps of the last one."""
        steps = self.result.steps
        peaks: list[Peaks] = []
        for _ in range(window.num_alike, MAX_WINDOWS):
            for number, number_left in pairs:
                self.alive[number] = self.alive.pop(number_left)
                if number_left in self.holders:
                    self.holders[number] = self.holders.pop(number_left)
                self.result.block_bytes[number] = self.result.block_bytes[number_left]
            previous = steps[num_earlier:]
            self.play(window.start, window.stop)
            del steps[num_earlier : num_earlier + len(previous)]
            peaks.append(_peaks(steps[num_earlier:]))
            if _values(previous) == _values(steps[num_earlier:]):
                return
        self.result.caveats += unsettled(window, peaks)

    def latest(self, numbers: Set[int], window: Window) -> list[Alloc]:
        """The last allocations with these ids before a window's end, in order of allocation."""
        allocs: list[Alloc] = []
        events = islice(reversed(self.events), len(self.events) - window.stop, None)
        while len(allocs) < len(numbers):
            event = next(events)
            if type(event) is Alloc and event.id in numbers:
                allocs.append(event)
        return allocs[::-1]

    def play(self, start: int, stop: int) -> None:
        """Replay a part of the events."""
        allocator = self.allocator
        allocate, free, alive, holders, held = (
            allocator.allocate,
            allocator.free,
            self.alive,
            self.holders,
            self.held,
        )
        block_bytes, peak_bytes = self.result.block_bytes, self.peak_bytes()
        for position, event in enumerate(islice(self.events, start, stop), start):
            if type(event) is Alloc:
                number, size_bytes, stream, category, _, _, fallback = event
                if not size_bytes:
                    continue
                try:
                    block = (
                        allocate(size_bytes, stream) if fallback is None else self.workspace(event)
                    )
                except OutOfMemoryError as error:
                    self.result.out_of_memory = self.failure(event, error)
                    raise
                if block is None:
                    block_bytes[number] = 0
                    continue
                alive[number] = block
                block_bytes[number] = block.size_bytes
                if category in held:
                    holders[number] = event
                    held[category] += size_bytes
                if allocator.allocated_bytes > peak_bytes:
                    peak_bytes = allocator.allocated_bytes
                    self.peak = (peak_bytes, position)
            elif type(event) is Free:
                number = event.id
                freed = alive.pop(number, None)
                if freed is not None:
                    free(freed)
                    if number in holders:
                        holder = holders.pop(number)
                        held[holder.category] -= holder.size_bytes  # type: ignore[index]  # persistent allocations have a category
            else:
                self.mark(position, event)  # type: ignore[arg-type]  # type(event) excludes the others
                peak_bytes = self.peak_bytes()

    def workspace(self, alloc: Alloc) -> _Block | None:
        """Allocate a workspace, or that of the next algorithm that fits; None if it needs none."""

        def allocate(size_bytes: int) -> _Block:
            return self.allocator.allocate(size_bytes, alloc.stream)

        return self.plans.allocate(alloc, allocate, is_backward=self.phase is Phase.BACKWARD)

    def peak_bytes(self) -> float:
        """The allocated peak of the step so far; infinite outside phases, which do not count."""
        return self.peak[0] if self.phase else math.inf

    def mark(
        self, position: int, event: EmptyCache | PhaseStart | PhaseEnd | StepStart | StepEnd
    ) -> None:
        if isinstance(event, EmptyCache):
            self.allocator.empty_cache()
        elif isinstance(event, StepStart):
            self.windows, self.peak = [], (-1, -1)
            if event.stage is not self.stage:
                self.num_steps = 0
            self.is_warm_up = (
                not self.has_updated
                if event.stage is Stage.TRAINING
                else event.stage is not self.stage
            )
            self.stage, self.batch_size = event.stage, event.batch_size
        elif isinstance(event, StepEnd):
            self.num_steps += 1
            self.result.steps.append(
                ReplayedStep(
                    windows=tuple(self.windows),
                    is_warm_up=self.is_warm_up,
                    stage=self.stage or Stage.TRAINING,
                    batch_size=self.batch_size,
                    peak_position=self.peak[1],
                )
            )
        elif isinstance(event, PhaseStart):
            self.phase, self.covers, self.start = (
                event.phase,
                event.covers or (event.phase,),
                self.stats(),
            )
            self.allocator.reset_peaks()
            if self.allocator.allocated_bytes > self.peak[0]:
                self.peak = (self.allocator.allocated_bytes, position)
        else:
            self.end_phase(event.phase)

    def end_phase(self, phase: Phase) -> None:
        start, end = self.start, self.stats()
        self.phase = None
        self.has_updated |= phase is Phase.OPTIMIZER_STEP
        retries = (
            None
            if end.num_alloc_retries is None
            else end.num_alloc_retries - (start.num_alloc_retries or 0)
        )
        window = PhaseMemory(
            phase=phase,
            covers=self.covers,
            start=start,
            end=end,
            peak_allocated_bytes=end.peak_allocated_bytes,
            peak_reserved_bytes=end.peak_reserved_bytes,
            num_alloc_retries=retries,
            num_ooms=None if retries is None else 0,
        )
        self.windows.append(window)

    def stats(self) -> MemoryStats:
        """Memory now; retries are not counted with unlimited memory."""
        stats = replace(self.allocator.stats(), by_category=dict(self.held))
        return replace(stats, num_alloc_retries=None, num_ooms=None) if self.unlimited else stats

    def failure(self, alloc: Alloc, error: OutOfMemoryError) -> str:
        name = "step" if self.stage in (None, Stage.TRAINING) else self.stage.label
        where = f"{name} {self.num_steps + 1}" + (f", {self.phase.label}" if self.phase else "")
        module = f"module {alloc.module!r}" if alloc.module else "the root module"
        text = f"{where}, {alloc.operator or 'an allocation'} in {module}: {error}"
        if alloc.category is Category.WORKSPACE and "convolution" in alloc.operator:
            # `try_configs` in Conv_v8.cpp; without cuDNN the other workspaces are not known.
            tried = alloc.fallback.sizes_bytes() if alloc.fallback else ()
            text += (
                " The workspaces of cuDNN's other algorithms do not fit either."
                if tried
                else " PyTorch then tries a slower algorithm of cuDNN, which may need less."
            )
        return text


def _peaks(steps: Sequence[ReplayedStep]) -> Peaks:
    """The allocated and the reserved peak."""
    windows = [window for step in steps for window in step.windows]
    allocated, reserved = (
        (window.peak_allocated_bytes for window in windows),
        (window.peak_reserved_bytes for window in windows),
    )
    return largest(allocated) or 0, largest(reserved) or 0


def _values(steps: Sequence[ReplayedStep]) -> list[PhaseMemory]:
    """All values of some steps, without the counts since the program began."""
    return [
        replace(
            window,
            start=replace(window.start, num_alloc_retries=None, num_ooms=None),
            end=replace(window.end, num_alloc_retries=None, num_ooms=None),
        )
        for step in steps
        for window in step.windows
    ]
