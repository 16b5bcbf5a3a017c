"""What can be said of a Trainer's step before it first runs: the prediction, and what stands in its way. Nothing here raises."""

from __future__ import annotations

from typing import Any

import torch

from memcallback.prediction import Prediction
from memcallback.steps import TrainingStep, infer_batch_size
from memcallback.textbook import is_sharded, predict
from memcallback.warn import warn


def forecast(
    trainer: Any, pl_module: Any, batch: object, batch_size: int | None, *, device: int | None, device_name: str
) -> Prediction | None:
    """Predict the step of a Trainer from its own module, optimizers, precision and first batch.

    Args:
        trainer: The Trainer, about to run its first step.
        pl_module: Its module.
        batch: Its first batch.
        batch_size: Samples in the batch, None to infer them.
        device: The capacity to predict for, in bytes; None if it does not matter.
        device_name: The name of the device.

    Returns:
        The prediction; None, with a warning, if there can be none.
    """
    if batch_size is None and infer_batch_size(batch).batch_size is None:
        return None
    try:
        if is_sharded(trainer.model):
            # Lightning's FSDP wraps the module and leaves flat shards in it; predict() says what to do.
            step = TrainingStep(trainer.model, batch, batch_size=batch_size)
        else:
            step = TrainingStep.from_lightning(
                pl_module, batch, optimizer=trainer.optimizers, precision=trainer.precision, batch_size=batch_size
            )
        return predict(step, device=device, device_name=device_name)
    except Exception as error:  # whatever a user's model does on shapes alone, training goes on
        warn(
            f"The step's memory could not be predicted: {type(error).__name__}: {str(error).rstrip('.')}. It is still recorded. "
            "MemoryCallback(predict=False) leaves the prediction out."
        )
        return None


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
    devices = sorted({str(parameter.device) for parameter in pl_module.parameters()})
    if len(devices) > 1:
        warn(
            f"The model's parameters are on {len(devices)} devices ({', '.join(devices)}); memory of {device} alone is recorded, and the "
            "prediction counts the parameters there. Record the others with a MemoryRecorder(device=...) each."
        )
