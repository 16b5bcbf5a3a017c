"""A Trainer's step as a TrainingStep; predictions with and without savings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memcallback.core.errors import reason_of, warn_and_go_on
from memcallback.devices.catalogue import Device, DeviceSpec, HostSpec
from memcallback.devices.local import resolve
from memcallback.devices.memory import cpu_memory
from memcallback.integrations.lightning.trainer.savings import TrainerSavings
from memcallback.integrations.lightning.trainer.strategies import UnshardedModule, ranks_within
from memcallback.prediction import predict as tracing
from memcallback.prediction.predict_or_warn import traced
from memcallback.prediction.prediction import Prediction
from memcallback.savings.plan import Plan
from memcallback.savings.what_if import what_if
from memcallback.step.model import is_sharded
from memcallback.step.training_step import TrainingStep

#: How a person leaves the prediction of a Trainer's step out.
LEAVES_OUT_PREDICTION = "MemoryCallback(predict=False)"


def forecast_without(
    savings: TrainerSavings, make_step: Callable[[], TrainingStep], device: torch.device
) -> Prediction | None:
    """Predict the step of a Trainer as it would be without the savings of the callback, to say what
    they save.
    """
    try:
        with savings.taken_from(make_step()) as step:
            return None if step is None else traced(step, device, lambda _: None)
    except Exception as error:  # whatever a user's model does on fake tensors, training goes on
        warn_and_go_on(
            f"What the savings save is not told: the step without them cannot be predicted. {reason_of(error)}"
        )
        return None


def plan_for(
    make_step: Callable[[], TrainingStep],
    *,
    device: torch.device,
    capacity_bytes: int | None,
    headroom: float,
    say: Callable[[str], None],
) -> Plan | None:
    """What savings would buy in the step of a Trainer."""
    try:
        spec: Device | torch.device = device
        if device.type == "cpu":
            spec = HostSpec(
                capacity_bytes=cpu_memory().capacity_bytes
                if capacity_bytes is None
                else capacity_bytes
            )
        elif capacity_bytes is not None:
            here = resolve(device)
            assert isinstance(here, DeviceSpec)
            # What others use of the device does not count against a capacity that was given.
            spec = replace(here, capacity_bytes=capacity_bytes, local_index=None)
        progress = tracing.report_progress(
            lambda part: say(f"Trying savings before the first step: {part}."), of="savings"
        )
        return what_if(make_step(), device=spec, headroom=headroom, progress=progress)
    except Exception as error:  # whatever a user's model does on fake tensors, training goes on
        warn_and_go_on(
            f"No savings could be tried. {reason_of(error)} MemoryCallback(what_if=False) leaves them out."
        )
        return None


def step_of(
    trainer: Any,
    pl_module: Any,
    batch: object,
    batch_size: int | None,
    whole: UnshardedModule | None = None,
) -> TrainingStep:
    """The step that a Trainer is about to run."""
    if whole is None and is_sharded(trainer.model):
        # Somebody else sharded it; there is no step of the whole.
        return TrainingStep(trainer.model, batch, batch_size=batch_size)
    # Lightning does not clip at 0 or below; "norm" is what it takes if no algorithm is named.
    clip = (
        trainer.gradient_clip_val
        if trainer.gradient_clip_val and trainer.gradient_clip_val > 0
        else None
    )
    is_by_value = trainer.gradient_clip_algorithm == "value"
    return TrainingStep.from_lightning(
        pl_module if whole is None else whole.module,
        batch,
        optimizer=trainer.optimizers if whole is None else None,
        precision=trainer.precision,
        batch_size=batch_size,
        accumulate=trainer.accumulate_grad_batches,
        clip_grad_norm=None if is_by_value else clip,
        clip_grad_value=clip if is_by_value else None,
        ranks=ranks_within(trainer) if whole is None else whole.ranks,
    )
