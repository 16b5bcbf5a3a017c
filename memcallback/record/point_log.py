"""PointLog: logs a training's points, each with the prediction once that is there."""

from __future__ import annotations

from memcallback.core.step_memory import DeviceMemory, StepMemory, larger
from memcallback.prediction.predict_or_warn import PredictedSteps
from memcallback.record.publisher import Publisher
from memcallback.record.rank_log import RankLog
from memcallback.record.step_recorder import StepRecorder
from memcallback.report.tags import step_curves

#: A step whose peak is so many times the highest before is drawn, wherever it is.
_NOTABLE_RISE = 1.01
#: Points that wait for a prediction at most; later ones are logged without it.
_MAX_WAITING = 1000


class PointLog:
    """The points of this rank: each is the largest step since the one before.

    Attributes:
        predicted: The prediction of the steps; None while it is being made, and points wait for it.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        publisher: Publisher,
        ranks: RankLog,
        *,
        capacity_bytes: int | None,
    ) -> None:
        self.predicted: PredictedSteps | None = PredictedSteps(None)
        self._recorder = recorder
        self._publisher = publisher
        self._ranks = ranks
        self._capacity_bytes = capacity_bytes
        self._unlogged: StepMemory | None = None
        #: Of the last step that was read.
        self._number = 0
        self._waiting: list[tuple[StepMemory, DeviceMemory, int]] = []
        #: The highest peaks so far of allocated and reserved memory; whether the last step dipped.
        self._highest: tuple[int, ...] = (0, 0)
        self._has_dipped = False

    def add(self, record: StepMemory, number: int, *, is_after_validation: bool) -> None:
        """Take a step into the next point."""
        self._number = number
        if not self._is_dip(record, is_after_validation):
            self._unlogged = larger(self._unlogged, record)

    def log(self, device: DeviceMemory) -> None:
        """Log the largest step since the last point, or let it wait for the prediction.

        The point is at the last step that was read, also if others came after it.
        """
        number = self._number
        step, self._unlogged = self._unlogged, None
        if step is None:
            return
        if self.predicted is None and len(self._waiting) < _MAX_WAITING:
            self._waiting.append((step, device, number))
        else:
            self._log_point(step, device, number)

    def flush(self) -> None:
        """Log the points that have waited for the prediction."""
        waiting, self._waiting = self._waiting, []
        for point in waiting:
            self._log_point(*point)

    def _is_dip(self, record: StepMemory, is_after_validation: bool) -> bool:
        """Whether a step is lower than others only because Lightning cleared the gradients."""
        peaks = (record.peak_allocated_bytes or 0, record.peak_reserved_bytes or 0)
        before, self._highest = self._highest, tuple(map(max, self._highest, peaks))
        # Where every step follows a validation, that is no dip.
        is_higher = any(now > _NOTABLE_RISE * then for now, then in zip(peaks, before, strict=True))
        self._has_dipped = is_after_validation and not is_higher and not self._has_dipped
        return self._has_dipped

    def _log_point(self, step: StepMemory, device: DeviceMemory, number: int) -> None:
        predicted = None if self.predicted is None else self.predicted.at(step.batch_size)
        self._publisher.curves(step_curves(step, predicted, device), number)
        self._ranks.send(
            step,
            predicted,
            number,
            meter=self._recorder.meter,
            device=device,
            capacity_bytes=self._capacity_bytes,
        )
