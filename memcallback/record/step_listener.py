"""StepListener: what a `MemoryRecorder` calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memcallback.core.step_memory import StepMemory
from memcallback.prediction.prediction import StepPrediction

if TYPE_CHECKING:
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport


class StepListener(Protocol):
    """Callbacks of a `MemoryRecorder`. They must not raise."""

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction of the steps, for the report on an out-of-memory error."""

    def wants_step(self) -> bool | None:
        """Whether to record the step that begins, also where only sampled steps are."""

    def on_step(self, record: StepMemory, batch: object) -> None:
        """A step was recorded."""

    def on_out_of_memory(self, report: OutOfMemoryReport, error: BaseException) -> None:
        """Memory ran out; an open step has not ended yet."""

    def close(self) -> None:
        """The recorder is closed."""
