"""The step being recorded."""

from __future__ import annotations

from collections.abc import Callable

from memcallback.core.module_table import ModuleTable
from memcallback.core.phase_spans import PhaseSpan, PhaseSpans, phase_of
from memcallback.core.step_memory import Holdings, MemoryStats, StepMemory, measured_window
from memcallback.core.types import Kind, Phase
from memcallback.devices.meters import Meter
from memcallback.record.module_timeline import ModuleTimeline


class OpenStep:
    """A step that has begun: its windows are pairs of boundaries, each a reading of the meter.

    Attributes:
        batch: As given.
        batch_size: As given.
        counts_holdings: As given.
        num_updates_before: As given.
        failed_in: The phase that an exception has ended; None if none has.
    """

    def __init__(
        self,
        batch: object,
        batch_size: int | None,
        *,
        counts_holdings: bool,
        num_updates_before: int,
        phases: PhaseSpans,
        meter: Meter,
        watch: ModuleTimeline | None,
    ) -> None:
        self.batch = batch
        self.batch_size = batch_size
        self.counts_holdings = counts_holdings
        self.num_updates_before = num_updates_before
        self.failed_in: Phase | None = None
        self._phases = phases
        self._meter = meter
        self._watch = watch
        self._stats: tuple[MemoryStats, ...] | None = None

    def begin(self) -> None:
        """Begin the reading."""
        self._meter.begin()
        if self._watch is not None:
            self._watch.begin()

    @property
    def current_phase(self) -> Phase | None:
        """The phase that is open and did begin; None between phases, and in one that is
        provisional.
        """
        return self._phases.current_phase

    @property
    def has_update(self) -> bool:
        """Whether an optimizer step is in one of its windows that are over."""
        return any(Phase.OPTIMIZER_STEP in covers for covers, _, _ in self._phases.windows)

    def open_phase(self, phase: Phase, *, is_provisional: bool) -> None:
        """As `PhaseSpans.open_phase`; nothing once the reading is over."""
        if self._stats is None:
            self._phases.open_phase(phase, is_provisional=is_provisional)

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """As `PhaseSpans.close_phase`; nothing once the reading is over."""
        if self._stats is None:
            self._phases.close_phase(covers=covers)

    def end_phases(self) -> None:
        """The step is over: so is the open phase, unless it is provisional, and did not happen."""
        if self._stats is None:
            self._phases.end_step()

    def read(self, held: Holdings | None) -> None:
        """A boundary."""
        self._meter.read(held)
        if self._watch is not None:
            self._watch.boundary()

    def end_reading(self) -> tuple[MemoryStats, ...]:
        """No boundary is read any more."""
        if self._stats is None:
            if self._watch is not None:
                self._watch.end()
            self._stats = self._meter.end()
        return self._stats

    def to_memory(
        self, *, index: int, num_updates: int | None, is_interrupted: bool
    ) -> tuple[StepMemory, tuple[MemoryStats, ...], Callable[[], ModuleTable] | None]:
        """What the step took; its reading is over with that."""
        stats = self.end_reading()
        windows: list[PhaseSpan] = (
            self._phases.windows
            if self._watch is None
            else self._watch.windows(self._phases.windows)
        )
        record = StepMemory(
            kind=Kind.MEASURED,
            source=self._meter.source,
            device_name=self._meter.device_name,
            windows=tuple(
                measured_window(phase_of(covers), covers, stats[start : end + 1])
                for covers, start, end in windows
            ),
            index=index,
            batch_size=self.batch_size,
            is_warm_up=self.num_updates_before == 0,
            num_optimizer_updates=num_updates,
            is_interrupted=is_interrupted,
        )
        return (
            record,
            stats,
            None
            if self._watch is None
            else self._watch.recording(windows, stats, batch_size=self.batch_size),
        )
