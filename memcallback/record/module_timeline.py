"""Record one step by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from memcallback.core.allocation_trace import ModuleMark
from memcallback.core.errors import warn_and_go_on
from memcallback.core.module_table import ModuleInfo, ModuleTable, Span, modules_of, phase_of_span
from memcallback.core.phase_spans import PhaseSpan
from memcallback.core.step_memory import MemoryStats
from memcallback.core.types import Kind
from memcallback.devices.meters import Meter
from memcallback.step.module_follower import ModuleFollower


class ModuleTimeline:
    """Puts readings between the boundaries of a step, and tells which of them belong to which
    module.
    """

    def __init__(
        self, models: Sequence[nn.Module], infos: tuple[ModuleInfo, ...], meter: Meter
    ) -> None:
        self._infos = infos
        self._meter = meter
        self._follower = ModuleFollower(models, self._change, self._fail)
        self._marks: dict[int, ModuleMark] = {}
        self._boundaries: list[int] = []
        self._num_readings = 0
        self._has_failed = False

    def begin(self) -> None:
        """The step begins; the meter has begun too."""
        try:
            self._follower.begin()
        except Exception as error:  # modules of users can refuse hooks
            self._follower.end()
            self._fail(error)

    def boundary(self) -> None:
        """The meter has read a boundary."""
        self._boundaries.append(self._num_readings)
        self._num_readings += 1
        self._follower.begin_phase()

    def end(self) -> None:
        """The meter is about to end: take back all hooks."""
        self._follower.end()

    def windows(self, windows: Sequence[PhaseSpan]) -> list[PhaseSpan]:
        """The same windows by the numbers of the meter's readings instead of those of boundaries."""
        return [
            (covers, self._boundaries[start], self._boundaries[end])
            for covers, start, end in windows
        ]

    def recording(
        self,
        windows: Sequence[PhaseSpan],
        stats: Sequence[MemoryStats],
        *,
        batch_size: int | None,
    ) -> Callable[[], ModuleTable] | None:
        """What was read, by module, once it is asked for: adding it up takes longer than reading
        it.
        """
        if self._has_failed:
            return None
        source, device_name, infos, notes, marks = (
            self._meter.source,
            self._meter.device_name,
            self._infos,
            self._follower.notes,
            self._marks,
        )

        def table() -> ModuleTable:
            spans = [list(_spans(window, stats, marks)) for window in windows]
            return ModuleTable(
                step_kind=Kind.MEASURED,
                source=source,
                device_name=device_name,
                batch_size=batch_size,
                modules=modules_of(spans, infos),
                notes=notes,
            )

        return table

    def _change(self, path: tuple[str, ...], is_backward: bool) -> None:
        self._meter.mark()
        self._marks[self._num_readings] = ModuleMark(self._num_readings, path, is_backward)
        self._num_readings += 1

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            warn_and_go_on(
                f"Memory by module is not recorded in this step: {type(error).__name__}: {str(error).rstrip('.')}. The rest of it is."
            )


def _spans(
    window: PhaseSpan, stats: Sequence[MemoryStats], marks: Mapping[int, ModuleMark]
) -> Iterator[Span]:
    covers, start, end = window
    mark = ModuleMark(start, ())
    for position in range(start, end):
        mark = marks.get(position, mark)
        phase = phase_of_span(covers, is_backward=mark.is_backward)
        if phase is not None:
            before, after = stats[position], stats[position + 1]
            yield Span(
                phase,
                mark.path,
                before.allocated_bytes,
                after.allocated_bytes,
                after.peak_allocated_bytes,
            )
