"""Predict before the first step of a loop: trace, else the textbook formula, else a warning."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from memcallback.core.errors import PredictionError, reason_of, warn_and_go_on
from memcallback.prediction import predict as tracing
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.protocol import StepPrediction
from memcallback.prediction.textbook import predict as textbook
from memcallback.step.model import devices_of
from memcallback.step.training_step import TrainingStep


def predict_or_warn(
    make_step: Callable[[], TrainingStep],
    *,
    device: torch.device,
    device_name: str,
    capacity_bytes: int | None,
    say: Callable[[str], None],
    without: str,
) -> StepPrediction | None:
    """Predict a step: trace it; if it cannot be traced, the textbook law stands in, with a warning
    that says why.
    """
    try:
        step = make_step()
        step.check_predictable()
    except Exception as error:  # a loop's plugins can be of any kind
        _warn_of_none(reason_of(error), without)
        return None
    try:
        return traced(step, device, say)
    except Exception as error:  # whatever a user's model does on fake tensors, training goes on
        reason = reason_of(error)
    try:
        law = textbook.predict(step, device=capacity_bytes, device_name=device_name)
    except Exception:
        _warn_of_none(reason, without)
        return None
    warn_and_go_on(f"{reason} The textbook law stands in: an upper estimate with a lower edge.")
    return law


def traced(step: TrainingStep, device: torch.device, say: Callable[[str], None]) -> Prediction:
    """Predict a step by its trace, and say how long that took."""
    devices = devices_of(step.model)
    if len(devices) > 1:
        raise PredictionError(
            f"The step was not traced: its model is on {len(devices)} devices ({', '.join(devices)}), and a trace has one."
        )
    start = perf_counter()
    progress = tracing.how_far(lambda part: say(f"Tracing the step before it first runs: {part}."))
    prediction = tracing.predict(step, device=device, progress=progress)
    num_events = len(prediction.trace.traced.trace.events)
    say(f"Traced the step in {perf_counter() - start:.1f} s ({num_events:,} events).")
    return prediction


def _warn_of_none(reason: str, without: str) -> None:
    warn_and_go_on(
        f"The step's memory is recorded and not predicted. {reason} {without} leaves the prediction out."
    )
