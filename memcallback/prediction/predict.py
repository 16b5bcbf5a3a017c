"""predict(): the memory of a step, predicted in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memcallback.core.validation import described
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.isolation.isolated import TIMEOUT_S
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.apart import predict_apart
from memcallback.prediction.architectures import predict_with_least_room
from memcallback.prediction.prediction import Prediction
from memcallback.step.step import Step
from memcallback.step.training_step import TrainingStep


def predict(
    step: Step,
    *,
    device: str | int | torch.device | Device | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    settings: AllocatorSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
    isolate: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Prediction:
    """Predict the memory of a training or inference step, in bytes, without a device.

    For a CUDA device, the values are those that its allocator would show; for a CPU, the bytes of
    the live tensors.

    A copy of the step is traced with fake tensors. From three traces the prediction knows every
    batch size. If the step gives a `sequence_length`, it takes eight and knows other lengths too. A
    trace runs the step's own Python code, without its computations. On Linux it runs in a child
    process that is kept from changing, by accident, anything outside of itself: a variable, a file,
    a connection or a random number generator of this program. It is no sandbox.

    If `device` is only a size of memory, the step is predicted with two architectures, an A100's
    and an H100's, as `suggest_batch_size` does. The prediction is the one that leaves less room.

    Args:
        step: The step, a `TrainingStep` or an `InferenceStep`.
        device: The card, such as `NVIDIA A100-SXM4-80GB`; any size, such as `24GiB` or a number of
            bytes; `cpu`; or a device of this machine, such as `cuda:1` or a `torch.device`. By
            default the CUDA device of this machine.
        batch_size: Samples in the batch; by default as many as it has.
        sequence_length: How long the batch's sequences are; by default as long as the step says.
        settings: The settings of the card's allocator, an `AllocatorSettings` of
            `memcallback.prediction.allocator.settings`; by default those of this process's
            environment (PYTORCH_CUDA_ALLOC_CONF).
        progress: A function that is called with the number of finished traces and the total number,
            after each trace but the last and every two seconds during a long one. By default a
            line on stderr says how far the prediction is. A terminal and a notebook update this
            line; elsewhere a new line comes every ten seconds. `lambda done, num_all: None` prints
            nothing.
        isolate: Whether to trace in a child process. False, for debuggers, runs the step's code in
            this process; so does any system other than Linux. What the code changes outside of the
            model then stays changed. The environment variable `MEMCALLBACK_ISOLATE=0` does the
            same as False.
        timeout_s: Seconds, above 0, after which the child is killed.

    Returns:
        The prediction; its `caveats` say what was assumed.

    Raises:
        PredictionError: If the step cannot be traced, takes too long, or wants to change something
            outside of its process; if its batch size is unknown; or if its batch cannot be made
            larger or smaller, and another `batch_size` is asked for.
        ValueError: If `device` is unknown, or names a device that this machine does not have; if
            `batch_size` is below 1 or above 2**31; or if `sequence_length` is above 2**31, or given
            and the step does not say its own.
        TypeError: If `step` is not a step, or a number is not whole.
    """
    checked_step(step)
    spec = resolve(device)
    return predict_apart(
        lambda progress: predict_with_least_room(
            step,
            device=spec,
            batch_size=batch_size,
            sequence_length=sequence_length,
            settings=settings,
            progress=progress,
        ),
        isolate=isolate,
        timeout_s=timeout_s,
        progress=progress,
    )


def checked_step(step: object) -> Step:
    """Refuse what is no step."""
    if isinstance(step, Step):
        return step
    raise TypeError(
        f"step must be a TrainingStep or an InferenceStep, got {described(step)}. Give "
        "TrainingStep(model, batch, loss=..., optimizer=...) or InferenceStep(model, batch)."
    )


def checked_training(step: object) -> TrainingStep:
    """Refuse what is no training step."""
    if isinstance(step, TrainingStep):
        return step
    raise TypeError(
        f"step must be a TrainingStep, got {described(step)}. Give TrainingStep(model, batch, "
        "loss=..., optimizer=...): savings are for training."
    )
