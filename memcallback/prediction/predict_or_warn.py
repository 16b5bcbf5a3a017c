"""Predicts a training loop's steps: by a trace, else the textbook estimate, else with a warning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from memcallback.core.errors import CompiledCodeError, PredictionError, reason_of, warn_and_go_on
from memcallback.core.interruptions import ENDS, PassOver, raise_if_meant
from memcallback.core.module_table import ModuleTable
from memcallback.core.step_memory import StepMemory
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.prediction.allocator.at_start import Segment
from memcallback.prediction.apart import report_progress
from memcallback.prediction.predict_here import predict_here
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.step.model import devices_of
from memcallback.step.training_step import TrainingStep


def predict_or_warn(
    make_step: Callable[[], TrainingStep],
    *,
    device: Device | Exception,
    device_name: str,
    capacity_bytes: int | None,
    say: Callable[[str], None],
    without: str | None,
    make_simpler: Callable[[], TrainingStep] | None = None,
) -> StepPrediction | None:
    """Predict a training's step in this process. Never raises: failures become warnings.

    The device may be the error that finding it has raised: then the textbook estimate is left.
    `make_simpler` makes a step that is traced if the other cannot be: one with the model's own
    loss. `without` is what turns the prediction off; None in a search, which always predicts.
    """
    try:
        step = make_step()
        step.check_predictable()
    except ENDS as error:  # a loop's plugins and a module's optimizers can be of any kind
        raise_if_meant(error)
        warn_unpredicted(reason_of(error), without)
        return None
    try:
        if isinstance(device, Exception):
            raise device
        return traced(step, device, say)
    except CompiledCodeError as error:  # the textbook estimate would run that code
        warn_unpredicted(reason_of(error), without)
        return None
    except ENDS as error:  # whatever a user's model does on fake tensors, training goes on
        raise_if_meant(error)
        reason = reason_of(error)
    if make_simpler is not None and not isinstance(device, Exception):
        try:
            prediction = traced(make_simpler(), device, say)
        except ENDS as error:  # as above
            raise_if_meant(error)
        else:
            warn_and_go_on(f"{reason} The prediction uses the loss that the model returns.")
            return prediction
    from memcallback.prediction.textbook import predict as textbook

    try:
        law = textbook.predict(step, device=capacity_bytes, device_name=device_name)
    except ENDS as error:  # the model's code runs again
        raise_if_meant(error)
        warn_unpredicted(reason, without)
        return None
    warn_and_go_on(f"{reason} The textbook estimate is used instead: an upper and a lower bound.")
    return law


def device_or_error(device: torch.device) -> Device | Exception:
    """The device of a training, for a prediction that cannot ask for it itself."""
    try:
        return resolve(device)
    except Exception as error:  # drivers fail in many ways; the prediction says so
        return error


def begun_with(prediction: Prediction, segments: Sequence[Segment]) -> Prediction:
    """A prediction that begins with what the allocator has; as it is if that cannot be."""
    with PassOver():  # a real allocator can have what a simulated one cannot take over
        return prediction.begun_with(segments)
    return prediction


def traced(step: TrainingStep, device: Device, say: Callable[[str], None]) -> Prediction:
    """Predict a step by its trace, and say how long that took."""
    devices = devices_of(step.model)
    if len(devices) > 1:
        raise PredictionError(
            f"The step was not traced: its model is on {len(devices)} devices "
            f"({', '.join(devices)}), and a trace can have only one."
        )
    start = perf_counter()
    prediction = predict_here(
        step,
        device=device,
        progress=report_progress(lambda part: say(f"Tracing the step: {part}.")),
        with_limits=True,
    )
    num_events = len(prediction.trace.of(prediction.batch_size).traced.trace.events)
    say(f"Traced the step in {perf_counter() - start:.1f} s ({num_events:,} events).")
    return prediction


def warn_unpredicted(reason: str, without: str | None) -> None:
    """Warn that a training, or a search, has no prediction, why, and what turns it off."""
    warn_and_go_on(
        f"The search goes on without a prediction. {reason}"
        if without is None
        else f"Memory is recorded but not predicted. {reason} {without} turns the prediction off."
    )


class PredictedSteps:
    """A prediction at each batch size that a training comes to, predicted once each."""

    def __init__(self, prediction: StepPrediction | None) -> None:
        self._prediction = prediction
        self._steps: dict[int, StepMemory | None] = {}

    def at(self, batch_size: int | None) -> StepMemory | None:
        """The step at a batch size, by default the prediction's own; None if it is not known."""
        if self._prediction is None:
            return None
        size = self._prediction.batch_size if batch_size is None else batch_size
        if size not in self._steps:
            try:
                self._steps[size] = self._prediction.at(size).step
            except ValueError:
                self._steps[size] = None
        return self._steps[size]


def predicted_modules(
    prediction: StepPrediction | None, batch_size: int | None
) -> ModuleTable | None:
    """The predicted memory by module at a batch size; None if it is not known."""
    if not isinstance(prediction, Prediction):
        return None
    try:
        modules = prediction.at(batch_size).modules
    except ValueError:  # the trace does not know this batch size
        return None
    return modules if modules.ran else None
