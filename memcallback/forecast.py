"""What can be said of a Trainer's step before it first runs: the prediction, and what stands in its way. Nothing here raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from memcallback import textbook, tracing
from memcallback.cpu_meter import cpu_memory
from memcallback.device_here import device_here
from memcallback.devices import Device, HostSpec
from memcallback.holdings import bucket_bytes
from memcallback.plan import Plan
from memcallback.planning import what_if
from memcallback.predicted import StepPrediction
from memcallback.prediction import Prediction
from memcallback.savings_lightning import TrainerSavings
from memcallback.steps import PredictionError, TrainingStep, infer_batch_size, is_sharded
from memcallback.units import format_bytes
from memcallback.warn import warn


def forecast(
    trainer: Any,
    pl_module: Any,
    batch: object,
    batch_size: int | None,
    *,
    device: torch.device,
    device_name: str,
    capacity_bytes: int | None,
    say: Callable[[str], None],
) -> StepPrediction | None:
    """Predict the step of a Trainer from its own module, optimizers, precision, accumulation and first batch.

    The step is traced; if it cannot be, the textbook law stands in, with a warning that says why.

    Args:
        trainer: The Trainer, about to run its first step.
        pl_module: Its module.
        batch: Its first batch.
        batch_size: Samples in the batch, None to infer them.
        device: The device that trains.
        device_name: Its name.
        capacity_bytes: The memory to plan for, if it is not the device's own.
        say: Prints a line.

    Returns:
        The prediction; None, with a warning, if there can be none.
    """
    if batch_size is None and infer_batch_size(batch).batch_size is None:
        return None
    try:
        step = step_of(trainer, pl_module, batch, batch_size)
        step.check_predictable()
    except Exception as error:  # a Trainer's plugins can be of any kind
        _warn_of_none(_reason(error))
        return None
    try:
        return _traced(step, device, say)
    except Exception as error:  # whatever a user's model does on fake tensors, training goes on
        reason = _reason(error)
    try:
        law = textbook.predict(step, device=capacity_bytes, device_name=device_name)
    except Exception:
        _warn_of_none(reason)
        return None
    warn(f"{reason} The textbook law stands in: an upper estimate with a lower edge.")
    return law


def forecast_without(
    savings: TrainerSavings, trainer: Any, pl_module: Any, batch: object, batch_size: int | None, *, device: torch.device
) -> Prediction | None:
    """Predict the step of a Trainer as it would be without the savings of the callback, to say what they save.

    Args:
        savings: The savings, which are applied.
        trainer: The Trainer, about to run its first step.
        pl_module: Its module.
        batch: Its first batch.
        batch_size: Samples in the batch, None to infer them.
        device: The device that trains.

    Returns:
        The prediction; None if there are no savings, and, with a warning, if there can be none.
    """
    try:
        with savings.taken_from(step_of(trainer, pl_module, batch, batch_size)) as step:
            return None if step is None else _traced(step, device, lambda _: None)
    except Exception as error:  # whatever a user's model does on fake tensors, training goes on
        warn(f"What the savings save is not told: the step without them cannot be predicted. {_reason(error)}")
        return None


def plan_for(
    trainer: Any,
    pl_module: Any,
    batch: object,
    batch_size: int | None,
    *,
    device: torch.device,
    capacity_bytes: int | None,
    headroom: float,
    say: Callable[[str], None],
) -> Plan | None:
    """What savings would buy in the step of a Trainer.

    Args:
        trainer: The Trainer, about to run its first step.
        pl_module: Its module.
        batch: Its first batch.
        batch_size: Samples in the batch, None to infer them.
        device: The device that trains.
        capacity_bytes: The memory to plan for, if it is not the device's own.
        headroom: The fraction of it that the largest batch sizes keep free.
        say: Prints a line.

    Returns:
        The plan; None, with a warning, if there can be none.
    """
    try:
        spec: Device | torch.device = device
        if device.type == "cpu":
            spec = HostSpec(capacity_bytes=cpu_memory().capacity_bytes if capacity_bytes is None else capacity_bytes)
        elif capacity_bytes is not None:
            spec = replace(device_here(device), capacity_bytes=capacity_bytes)
        progress = tracing.how_far(lambda part: say(f"Trying savings before the first step: {part}."), of="savings")
        return what_if(step_of(trainer, pl_module, batch, batch_size), device=spec, headroom=headroom, progress=progress)
    except Exception as error:  # whatever a user's model does on fake tensors, training goes on
        warn(f"No savings could be tried. {_reason(error)} MemoryCallback(what_if=False) leaves them out.")
        return None


def step_of(trainer: Any, pl_module: Any, batch: object, batch_size: int | None) -> TrainingStep:
    """The step that a Trainer is about to run.

    Args:
        trainer: The Trainer.
        pl_module: Its module.
        batch: Its first batch.
        batch_size: Samples in the batch, None to infer them.
    """
    if is_sharded(trainer.model):
        # Lightning's FSDP wraps the module and leaves flat shards in it; there is no step of the whole.
        return TrainingStep(trainer.model, batch, batch_size=batch_size)
    # Lightning does not clip at 0 or below; "norm" is what it takes if no algorithm is named.
    clip = trainer.gradient_clip_val if trainer.gradient_clip_val and trainer.gradient_clip_val > 0 else None
    is_by_value = trainer.gradient_clip_algorithm == "value"
    return TrainingStep.from_lightning(
        pl_module,
        batch,
        optimizer=trainer.optimizers,
        precision=trainer.precision,
        batch_size=batch_size,
        accumulate=trainer.accumulate_grad_batches,
        clip_grad_norm=None if is_by_value else clip,
        clip_grad_value=clip if is_by_value else None,
    )


def _traced(step: TrainingStep, device: torch.device, say: Callable[[str], None]) -> Prediction:
    devices = _devices_of(step.model)
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


def _reason(error: Exception) -> str:
    """What went wrong; an error of ours says it in words, another one needs its name."""
    text = str(error).strip().rstrip(".")
    return f"{text}." if isinstance(error, PredictionError) else f"{type(error).__name__}: {text}."


def _warn_of_none(reason: str) -> None:
    warn(f"The step's memory is recorded and not predicted. {reason} MemoryCallback(predict=False) leaves the prediction out.")


def notes_on(trainer: Any, pl_module: torch.nn.Module) -> tuple[str, ...]:
    """What a job of several devices has beyond the step that is predicted, one sentence each."""
    if type(trainer.model).__name__ != "DistributedDataParallel":
        return ()
    buckets = format_bytes(bucket_bytes(pl_module))
    return (f"Not predicted: the buckets in which DistributedDataParallel sums gradients, about {buckets} beside the gradients.",)


def warn_of_batch(batch: object, batch_size: int | None) -> None:
    """Say what the batch size cannot be inferred from, or that it was guessed.

    Args:
        batch: The first batch.
        batch_size: What the user gave; nothing is said then.
    """
    if batch_size is not None:
        return
    found = infer_batch_size(batch)
    if found.batch_size is None:
        warn(
            f"The batch size cannot be inferred from a batch of type {type(batch).__name__}: no tensor in it has a first dimension. Memory is "
            "recorded, but not predicted, and no batch size is suggested. Give it: MemoryCallback(batch_size=32)."
        )
    elif found.is_ambiguous:
        warn(
            f"The tensors of the batch differ in their first dimension; {found.batch_size}, the most frequent, is taken for the batch size. "
            "If that is wrong, give it: MemoryCallback(batch_size=32)."
        )


def warn_of_devices(pl_module: torch.nn.Module, device: torch.device) -> None:
    """Say that a model is on several devices, of which one is recorded."""
    devices = _devices_of(pl_module)
    if len(devices) > 1:
        warn(
            f"The model's parameters are on {len(devices)} devices ({', '.join(devices)}); memory of {device} alone is recorded, and the "
            "prediction counts the parameters there. Record the others with a MemoryRecorder(device=...) each."
        )


def _devices_of(model: torch.nn.Module) -> list[str]:
    return sorted({str(parameter.device) for parameter in model.parameters()})
