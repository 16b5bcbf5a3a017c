"""Turns begin/end signals of a loop into phase windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from memcallback.core.types import Phase

#: The phases that a window covers, in order, and the numbers of the boundaries at which it begins
#: and ends.
PhaseSpan = tuple[tuple[Phase, ...], int, int]


class Phases(Protocol):
    """What is told which phases begin and end."""

    @property
    def current_phase(self) -> Phase | None:
        """The phase that is open and did begin; None between phases, and in one that is
        provisional.
        """

    def open_phase(self, phase: Phase, *, is_provisional: bool = False) -> None:
        """Begin a phase, ending the one that is open at the same boundary."""

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """End the open phase, if there is one."""


@dataclass
class PhaseSpans:
    """The windows of one step.

    Attributes:
        at_boundary: Called at each boundary; it takes a reading.
        windows: The windows that are over.
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
        """As `Phases`."""
        return None if self._is_provisional else self._phase

    def open_phase(self, phase: Phase, *, is_provisional: bool = False) -> None:
        """Begin a phase, ending the one that is open at the same boundary.

        An optimizer step right after a backward pass begins with the boundary that ended it:
        nothing happens between them that a person would look for, and a step stays at five
        readings.
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
        self._phase, self._start, self._is_provisional = (
            phase,
            self._num_boundaries - 1,
            is_provisional,
        )

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """End the open phase, if there is one."""
        if self._phase is None:
            return
        self._boundary()
        covers = covers or (self._phase,)
        self.windows.append((covers, self._start, self._num_boundaries - 1))
        self._phase, self._is_provisional, self._is_after_backward = (
            None,
            False,
            Phase.BACKWARD in covers,
        )

    def end_step(self) -> None:
        """The step is over: so is the open phase, unless it is provisional, and did not happen."""
        if not self._is_provisional:
            self.close_phase()

    def _boundary(self) -> None:
        self.at_boundary()
        self._num_boundaries += 1
        self._is_after_backward = False


def phase_of(covers: tuple[Phase, ...]) -> Phase:
    """The phase for which a window is named: of a forward and backward pass in one the backward
    pass, which usually has the peak.
    """
    return max(covers, key=list(Phase).index)


def end_forward(phases: Phases) -> None:
    """The forward pass is over."""
    if phases.current_phase is Phase.OPTIMIZER_STEP:
        # An optimizer has called its closure, and nothing marks where the forward pass in it began.
        phases.close_phase(covers=(Phase.OPTIMIZER_STEP, Phase.FORWARD))
    elif phases.current_phase is Phase.FORWARD:
        phases.close_phase()


def begin_backward(phases: Phases) -> None:
    """The backward pass begins."""
    end_forward(phases)
    phases.open_phase(Phase.BACKWARD)


def end_backward(phases: Phases, *, is_manual: bool) -> None:
    """The backward pass is over; by hand, another forward pass may follow."""
    phases.close_phase()
    if is_manual:
        phases.open_phase(Phase.FORWARD, is_provisional=True)


def begin_update(phases: Phases, *, is_manual: bool) -> None:
    """The optimizer step begins; what comes again inside it is nothing new."""
    if phases.current_phase is Phase.OPTIMIZER_STEP:
        return
    if phases.current_phase is Phase.FORWARD:
        # By hand, a bare loss.backward() leaves no mark between the two passes; else there was no
        # backward pass.
        phases.close_phase(covers=(Phase.FORWARD, Phase.BACKWARD) if is_manual else ())
    phases.open_phase(Phase.OPTIMIZER_STEP)


def end_update(phases: Phases, *, is_manual: bool) -> None:
    """The optimizer step is over; by hand, another forward pass may follow."""
    if is_manual and phases.current_phase is None:
        # A closure has run both passes inside the optimizer's step; what came since is the update.
        phases.open_phase(Phase.OPTIMIZER_STEP)
    if phases.current_phase is Phase.OPTIMIZER_STEP:
        phases.close_phase()
        if is_manual:
            phases.open_phase(Phase.FORWARD, is_provisional=True)


def end_manual_step(phases: Phases) -> None:
    """A step by hand is over."""
    if phases.current_phase is Phase.FORWARD:
        # A loop that calls neither manual_backward nor an optimizer that is known marks nothing.
        phases.close_phase(covers=(Phase.FORWARD, Phase.BACKWARD))
