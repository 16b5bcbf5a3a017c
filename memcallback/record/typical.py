"""TypicalStep: finds the most common kind of a training's steady steps, and keeps one of them."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.core.step_memory import StepMemory, larger
from memcallback.core.types import Phase
from memcallback.core.units import MiB

#: Steps are of a kind if the peaks of their phases agree within this share plus so many bytes.
_SHARE = 0.01
_SLACK_BYTES = MiB
#: Kinds at most; where every batch has another length, nearly every step is a kind.
_MAX_KINDS = 32


@dataclass
class _Kind:
    """Steps with about the same peaks: how many there were, and the last sampled one."""

    step: StepMemory
    number: int = 1


class TypicalStep:
    """Steps are added in order. Those without a split by category only count."""

    def __init__(self) -> None:
        self._kinds: list[_Kind] = []

    def __copy__(self) -> TypicalStep:
        other = TypicalStep()
        other._kinds = [_Kind(kind.step, kind.number) for kind in self._kinds]
        return other

    def add(self, step: StepMemory) -> None:
        """Add a steady step."""
        is_sampled = step.held_bytes is not None
        for kind in self._kinds:
            if _are_alike(kind.step, step):
                kind.number += 1
                kind.step = step if is_sampled else kind.step
                return
        if is_sampled:
            if len(self._kinds) == _MAX_KINDS:
                self._kinds.remove(min(self._kinds, key=lambda kind: kind.number))
            self._kinds.append(_Kind(step))

    @property
    def step(self) -> StepMemory | None:
        """The last sampled step of the kind of which there were most; None before the first.

        Of kinds with as many steps, it is of the one with the largest peaks.
        """
        best: _Kind | None = None
        for kind in self._kinds:
            best = kind if best is None or _is_better(kind, best) else best
        return None if best is None else best.step


def _is_better(kind: _Kind, other: _Kind) -> bool:
    """Whether a kind is the more typical one; steps with an update before all others."""
    ours, theirs = (
        (Phase.OPTIMIZER_STEP in each.step.phases, each.number) for each in (kind, other)
    )
    if ours != theirs:
        return ours > theirs
    return larger(other.step, kind.step, in_all_phases=True) is kind.step


def _are_alike(step: StepMemory, other: StepMemory) -> bool:
    if step.batch_size != other.batch_size or step.phases.keys() != other.phases.keys():
        return False
    for phase, window in step.phases.items():
        ours, theirs = window.peak_allocated_bytes, other.phases[phase].peak_allocated_bytes
        if ours is None or theirs is None:
            continue
        if abs(ours - theirs) > _SHARE * ours + _SLACK_BYTES:
            return False
    return True
