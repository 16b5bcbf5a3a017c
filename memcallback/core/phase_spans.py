"""Turns begin/end signals from a training loop into phase spans; for measuring and for tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from memcallback.core.types import Phase

#: The phases that a span covers, in order, and the numbers of its first and last boundary.
PhaseSpan = tuple[tuple[Phase, ...], int, int]


class Phases(Protocol):
    """Receives the begin/end signals of phases."""

    @property
    def current_phase(self) -> Phase | None:
        """The open phase; None between phases and in a provisional one, which may never begin."""

    def open_phase(self, phase: Phase, *, is_provisional: bool = False) -> None:
        """Begin a phase, and end the open one at the same boundary."""

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """End the open phase, if there is one."""


@dataclass
class PhaseSpans:
    """The phase spans of one step.

    Attributes:
        at_boundary: Called at each boundary; it takes a reading.
        windows: The spans that have ended.
    """

    at_boundary: Callable[[], None]
    windows: list[PhaseSpan] = field(default_factory=list)
    _phase: Phase | None = None
    _start: int = 0
    _num_boundaries: int = 0
    _is_provisional: bool = False
    _is_after_backward: bool = False

    @property
    def current_phase(self) -> Phase | None:
        """The open phase; None between phases and in a provisional one."""
        return None if self._is_provisional else self._phase

    def open_phase(self, phase: Phase, *, is_provisional: bool = False) -> None:
        """Begin a phase, and end the open one at the same boundary.

        An optimizer step right after a backward pass shares its boundary: nothing of interest
        happens between them, and a step needs only five readings.
        """
        if (
            self._phase is not None
            and self._is_provisional
            and (is_provisional or phase is Phase.OPTIMIZER_STEP)
        ):
            self._phase = None
        if self._phase is not None:
            self.close_phase()
        elif not (is_provisional or (phase is Phase.OPTIMIZER_STEP and self._is_after_backward)):
            self._boundary()
        self._phase, self._is_provisional = phase, is_provisional
        self._start = self._num_boundaries - 1

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """End the open phase, if there is one."""
        if self._phase is None:
            return
        self._boundary()
        covers = covers or (self._phase,)
        self.windows.append((covers, self._start, self._num_boundaries - 1))
        self._phase, self._is_provisional = None, False
        self._is_after_backward = Phase.BACKWARD in covers

    def end_step(self) -> None:
        """End the step and its open phase; a provisional one did not happen."""
        if not self._is_provisional:
            self.close_phase()

    def _boundary(self) -> None:
        self.at_boundary()
        self._num_boundaries += 1


def phase_of(covers: tuple[Phase, ...]) -> Phase:
    """The last of a span's phases, which names it: a backward pass usually has the peak."""
    return max(covers, key=list(Phase).index)


def end_forward(phases: Phases) -> None:
    """End the forward pass."""
    if phases.current_phase is Phase.OPTIMIZER_STEP:
        # The optimizer has called its closure; nothing marks where its forward pass began.
        phases.close_phase(covers=(Phase.OPTIMIZER_STEP, Phase.FORWARD))
    elif phases.current_phase is Phase.FORWARD:
        phases.close_phase()


def begin_backward(phases: Phases) -> None:
    """Begin the backward pass."""
    end_forward(phases)
    phases.open_phase(Phase.BACKWARD)


def end_backward(phases: Phases, *, is_manual: bool) -> None:
    """End the backward pass; with manual optimization another forward pass may follow."""
    phases.close_phase()
    if is_manual:
        phases.open_phase(Phase.FORWARD, is_provisional=True)


def begin_update(phases: Phases, *, is_manual: bool) -> None:
    """Begin the optimizer step; nested signals are ignored."""
    if phases.current_phase is Phase.OPTIMIZER_STEP:
        return
    if phases.current_phase is Phase.FORWARD:
        # With manual optimization a bare loss.backward() leaves no mark between the two passes;
        # otherwise there was no backward pass.
        phases.close_phase(covers=(Phase.FORWARD, Phase.BACKWARD) if is_manual else ())
    phases.open_phase(Phase.OPTIMIZER_STEP)


def end_update(phases: Phases, *, is_manual: bool) -> None:
    """End the optimizer step; with manual optimization another forward pass may follow."""
    if is_manual and phases.current_phase is None:
        # A closure has run both passes inside the optimizer's step; the rest is the update.
        phases.open_phase(Phase.OPTIMIZER_STEP)
    if phases.current_phase is Phase.OPTIMIZER_STEP:
        phases.close_phase()
        if is_manual:
            phases.open_phase(Phase.FORWARD, is_provisional=True)


def end_manual_step(phases: Phases) -> None:
    """End a step of manual optimization."""
    if phases.current_phase is Phase.FORWARD:
        # A loop that calls neither manual_backward nor a known optimizer marks nothing.
        phases.close_phase(covers=(Phase.FORWARD, Phase.BACKWARD))
