"""StepPrediction: the interface of every prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from memcallback.core.step_memory import PhaseMemory, StepMemory
from memcallback.core.types import Category, Phase


class StepPrediction(Protocol):
    """The memory of one steady training step at one batch size, before it runs. All sizes in bytes."""

    @property
    def source(self) -> str:
        """How it was worked out, such as `traced step`."""

    @property
    def device_name(self) -> str:
        """What it is for."""

    @property
    def capacity_bytes(self) -> int | None:
        """The device's memory, None if unknown."""

    @property
    def batch_size(self) -> int:
        """Samples in the batch."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """What was assumed or left out, one sentence each."""

    @property
    def step(self) -> StepMemory:
        """The step, in the type in which measured steps are."""

    @property
    def phases(self) -> Mapping[Phase, PhaseMemory]:
        """The step's phases."""

    @property
    def peak_allocated_bytes(self) -> int:
        """The largest allocated figure of the step."""

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The largest reserved figure of the step, None if unknown."""

    @property
    def by_category(self) -> Mapping[Category, int]:
        """What stands at the peak of allocated memory."""

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory; None if that is unknown."""

    def at(self, batch_size: int) -> StepPrediction:
        """The same step at another batch size."""


class PredictedSteps:
    """A prediction at the batch sizes that a training comes by; each is worked out once."""

    def __init__(self, prediction: StepPrediction | None) -> None:
        self._prediction = prediction
        self._steps: dict[int, StepMemory | None] = {}

    def at(self, batch_size: int | None) -> StepMemory | None:
        """The predicted step at a batch size, by default the prediction's own; None if the
        prediction cannot tell.
        """
        if self._prediction is None:
            return None
        size = self._prediction.batch_size if batch_size is None else batch_size
        if size not in self._steps:
            try:
                self._steps[size] = self._prediction.at(size).step
            except ValueError:
                self._steps[size] = None
        return self._steps[size]
