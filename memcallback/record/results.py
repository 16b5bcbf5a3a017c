"""What a copy of a callback or a log keeps of the last training: results, and nothing live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memcallback.prediction.prediction import StepPrediction
from memcallback.report.report import Report

if TYPE_CHECKING:
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of one training; None for what there is not."""

    prediction: StepPrediction | None = None
    report: Report | None = None
    out_of_memory: OutOfMemoryReport | None = None

    @property
    def known_prediction(self) -> StepPrediction | None:
        """The prediction."""
        return self.prediction


class HasResults(Protocol):
    """What a monitor and the results in a copy have in common."""

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction."""

    @property
    def known_prediction(self) -> StepPrediction | None:
        """The prediction; None as long as it is being made."""

    @property
    def report(self) -> Report | None:
        """The last report."""

    @property
    def out_of_memory(self) -> OutOfMemoryReport | None:
        """The report on an out-of-memory error."""


def results_of(training: HasResults) -> Results:
    """The results of a training so far; nobody waits for its prediction."""
    return Results(
        prediction=training.known_prediction,
        report=training.report,
        out_of_memory=training.out_of_memory,
    )
