"""PeakHistory: the peaks of all steps of a training, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcallback.core.step_memory import StepMemory

if TYPE_CHECKING:
    from memcallback.page.charts import LineChart

#: Twice as many points as a picture shows; beyond that two neighbours become one.
_MOST_POINTS = 2000


class PeakHistory:
    """The largest peaks of stretches of steps, all as long as each other."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int, int]] = []
        self._stride = 1
        self._open: tuple[int, int, int] | None = None
        self._num_open = 0
        #: The step with the largest peak, by reserved memory where it is known, and its number.
        self.largest: tuple[StepMemory, int] | None = None

    def add(self, step: StepMemory, number: int) -> None:
        """Note a step's peaks; a step that was cut short has none."""
        if step.peak_allocated_bytes is None or step.is_interrupted:
            return
        if self.largest is None or _order(step) > _order(self.largest[0]):
            self.largest = step, number
        _, allocated, reserved = self._open or (0, 0, 0)
        self._open = (
            number,
            max(allocated, step.peak_allocated_bytes),
            max(reserved, step.peak_reserved_bytes or 0),
        )
        self._num_open += 1
        if self._num_open == self._stride:
            self._points.append(self._open)
            self._open, self._num_open = None, 0
            if len(self._points) == _MOST_POINTS:
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points = [
                    (later[0], max(one[1], later[1]), max(one[2], later[2])) for one, later in pairs
                ]
                self._stride *= 2

    def chart(self, predicted_bytes: int | None, capacity_bytes: int | None) -> LineChart | None:
        """Peaks over steps, beside the predicted one; None with fewer than two points."""
        from memcallback.page.charts import Line, LineChart

        points = [*self._points, *([self._open] if self._open else [])]
        if len(points) < 2:
            return None
        lines = [
            Line(
                name="allocated",
                points=[(number, size) for number, size, _ in points],
                kind="allocated",
            )
        ]
        if any(reserved for _, _, reserved in points):
            reserved_line = [(number, size) for number, _, size in points]
            lines.append(Line(name="reserved", points=reserved_line, kind="reserved"))
        if predicted_bytes is not None:
            ends = [(points[0][0], predicted_bytes), (points[-1][0], predicted_bytes)]
            lines.append(Line(name="predicted, allocated", points=ends, kind="predicted"))
        return LineChart(lines=lines, x_name="step", capacity_bytes=capacity_bytes)


def _order(step: StepMemory) -> tuple[int, int]:
    """What makes a step the largest of a training."""
    return step.peak_reserved_bytes or 0, step.peak_allocated_bytes or 0
