"""What can be said of a step before it first runs, in any loop: its prediction, and what stands in its way. Nothing here raises."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from memcallback import textbook, tracing
from memcallback.device_here import device_here
from memcallback.predicted import StepPrediction
from memcallback.prediction import Prediction
from memcallback.steps import PredictionError, TrainingStep, infer_batch_size
from memcallback.warn import warn_and_go_on


def foretell(
    make_step: Callable[[], TrainingStep],
    *,
    device: torch.device,
    device_name: str,
    capacity_bytes: int | None,
    say: Callable[[str], None],
    without: str,
) -> StepPrediction | None:
    """Predict a step: trace it; if it cannot be traced, the textbook law stands in, with a warning that says why.

    Args:
        make_step: Makes the step; a loop's own parts can stand in its way.
        device: The device that trains.
        device_name: Its name.
        capacity_bytes: The memory to plan for, if it is not the device's own.
        say: Prints a line.
        without: How a person leaves the prediction out, such as `MemoryCallback(predict=False)`.

    Returns:
        The prediction; None, with a warning, if there can be none.
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
    """Predict a step by its trace, and say how long that took.

    Args:
        step: The step.
        device: The device that trains.
        say: Prints a line.

    Raises:
        PredictionError: If it cannot be traced.
    """
    devices = devices_of(step.model)
    if len(devices) > 1:
        raise PredictionError(
            f"The step was not traced: its model is on {len(devices)} devices ({', '.join(devices)}), and a trace has one."
        )
    start = perf_counter()
    progress = tracing.how_far(lambda part: say(f"Tracing the step before it first runs: {part}."))
    prediction = tracing.predict(step, device="cpu" if device.type == "cpu" else device_here(device), progress=progress)
    _ = prediction.step  # the replay, which is kept
    num_events = len(prediction.trace.traced.trace.events)
    say(f"Traced the step in {perf_counter() - start:.1f} s ({num_events:,} events).")
    return prediction


def reason_of(error: Exception) -> str:
    """What went wrong; an error of ours says it in words, another one needs its name."""
    text = str(error).strip().rstrip(".")
    return f"{text}." if isinstance(error, PredictionError) else f"{type(error).__name__}: {text}."


def _warn_of_none(reason: str, without: str) -> None:
    warn_and_go_on(f"The step's memory is recorded and not predicted. {reason} {without} leaves the prediction out.")


def warn_of_batch(batch: object, batch_size: int | None, name: str) -> None:
    """Say what the batch size cannot be inferred from, or that it was guessed.

    Args:
        batch: The first batch.
        batch_size: What the user gave; nothing is said then.
        name: Of what takes a batch size, such as `MemoryCallback`.
    """
    if batch_size is not None:
        return
    found = infer_batch_size(batch)
    if found.batch_size is None:
        warn_and_go_on(
            f"The batch size cannot be inferred from a batch of type {type(batch).__name__}: no tensor in it has a first dimension. Memory is "
            f"recorded, but not predicted, and no batch size is suggested. Give it: {name}(batch_size=32)."
        )
    elif found.is_ambiguous:
        warn_and_go_on(
            f"The tensors of the batch differ in their first dimension; {found.batch_size}, the most frequent, is taken for the batch size. "
            f"If that is wrong, give it: {name}(batch_size=32)."
        )


def warn_of_devices(model: torch.nn.Module, device: torch.device) -> None:
    """Say that a model is on several devices, of which one is recorded."""
    devices = devices_of(model)
    if len(devices) > 1:
        warn_and_go_on(
            f"The model's parameters are on {len(devices)} devices ({', '.join(devices)}); memory of {device} alone is recorded, and the "
            "prediction counts the parameters there. Record the others with a MemoryRecorder(device=...) each."
        )


def devices_of(model: torch.nn.Module) -> list[str]:
    """The devices of a model's parameters."""
    return sorted({str(parameter.device) for parameter in model.parameters()})
