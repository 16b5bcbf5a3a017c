"""Replay: what a replay of a trace has found: memory per step, and allocations live at a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memcallback.core.allocation_trace import Alloc, Event, not_freed
from memcallback.core.step_memory import PhaseMemory
from memcallback.core.types import Stage


@dataclass(frozen=True)
class LiveAllocation:
    """A storage that is live at some moment.

    Attributes:
        alloc: The allocation; its `size_bytes` is the requested size.
        block_bytes: The size of its block, including rounding and a tail that is not split off.
    """

    alloc: Alloc
    block_bytes: int


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """One step of a replay.

    Attributes:
        windows: The phases in the order in which they ran.
        is_warm_up: Whether no optimizer phase came before it; of a forward pass alone, whether it
            is the first.
        stage: What it is a step of.
        batch_size: Samples in its batch; None for those of the trace.
        peak_position: The position of the event at which allocated memory is first largest in the
            step's phases; -1 if it has none.
    """

    windows: tuple[PhaseMemory, ...]
    is_warm_up: bool
    stage: Stage
    batch_size: int | None
    peak_position: int


@dataclass(kw_only=True)
class Replay:
    """The result of a replay.

    Attributes:
        steps: The steps that were replayed to their end; for the trace's last window those of its
            last repetition.
        num_alloc_retries: The number of retries.
        out_of_memory: What failed and where, if the allocator ran out of memory; the replay ends
            there. None if it did not.
        caveats: Why the last steps may not be steady, one sentence each.
        block_bytes: The id of each `Alloc` of more than 0 bytes -> the size of its block, in the
            last repetition if it was repeated; 0 if an algorithm without a workspace was taken.
    """

    steps: list[ReplayedStep] = field(default_factory=list)
    num_alloc_retries: int = 0
    out_of_memory: str | None = None
    caveats: tuple[str, ...] = ()
    block_bytes: dict[int, int] = field(default_factory=dict)


def live_at(
    position: int, events: Sequence[Event], block_bytes: Mapping[int, int]
) -> tuple[LiveAllocation, ...]:
    """The allocations live after an event, the largest first."""
    live = [
        LiveAllocation(alloc, block_bytes[alloc.id])
        for alloc in not_freed(events[: position + 1])
        if alloc.size_bytes
    ]
    return tuple(sorted(live, key=lambda item: item.block_bytes, reverse=True))
