"""The pytest fixture `memory_budget`: a test fails if a step takes more than it may.

pytest loads this module in every run, so PyTorch is imported on the first use of the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from memcallback.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memcallback.devices.catalogue import Device
    from memcallback.prediction.prediction import Prediction
    from memcallback.step.step import Step


@pytest.fixture
def memory_budget() -> Callable[..., Prediction]:
    """Fail if a step's peak is above a size: `memory_budget(step, "20GiB", device="L4")`.

    The peak (reserved, on a CPU allocated) is predicted, so no device has to be there. The test
    fails too if the step does not fit the device. `batch_size` and `sequence_length` are as in
    `memcallback.predict`. The prediction is returned.
    """
    return _within


def _within(
    step: Step,
    budget: str | int,
    *,
    device: str | int | Device,
    batch_size: int | None = None,
    sequence_length: int | None = None,
) -> Prediction:
    from memcallback.prediction.predict import predict

    budget_bytes = parse_bytes(budget)
    prediction = predict(
        step, device=device, batch_size=batch_size, sequence_length=sequence_length
    )
    if problems := [*_problems(prediction, budget_bytes)]:
        pytest.fail("\n\n".join([*problems, str(prediction)]), pytrace=False)
    return prediction


_within.__qualname__ = "memory_budget"  # as Python's errors about its arguments call it


def _problems(prediction: Prediction, budget_bytes: int) -> Iterator[str]:
    peak_bytes = prediction.peak_bytes
    if peak_bytes > budget_bytes:
        yield (
            f"The step takes {format_bytes(peak_bytes)} on {prediction.device_name}, "
            f"{format_bytes(peak_bytes - budget_bytes)} above its budget of "
            f"{format_bytes(budget_bytes)} (batch size {prediction.batch_size:,})."
        )
    if not prediction.fits:
        yield f"The step does not fit {prediction.device_name}: {prediction.out_of_memory}"
