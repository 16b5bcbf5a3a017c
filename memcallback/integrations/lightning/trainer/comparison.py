"""Compares savings beside the prediction of a Trainer's step, in the same child process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from memcallback.core.errors import reason_of, warn_and_go_on
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.devices.catalogue import Device, DeviceSpec, HostSpec
from memcallback.devices.local import local_memory, resolve
from memcallback.devices.memory import cpu_memory
from memcallback.integrations.lightning.trainer.savings import TrainerSavings
from memcallback.prediction.apart import report_progress
from memcallback.prediction.predict_or_warn import begun_with, device_or_error
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.record.settings import MonitorSettings
from memcallback.savings.plan import Plan
from memcallback.step.training_step import TrainingStep


class Compared(NamedTuple):
    """What is predicted beside a Trainer's step; None for what is not.

    Attributes:
        without: The step without the Trainer's savings.
        plan: The step with each saving.
        validation: A validation after it.
    """

    without: Prediction | None
    plan: Plan | None
    validation: Prediction | None


def comparer(
    make_step: Callable[[], TrainingStep],
    device: torch.device,
    savings: TrainerSavings,
    settings: MonitorSettings,
    *,
    tries_savings: bool,
    validation: Callable[[Device], Prediction | None] | None,
) -> Callable[[StepPrediction | None, Callable[[str], None]], Compared]:
    """What predicts the step without the Trainer's savings and, if asked, with each saving.

    `validation` predicts the validation on a device; None where none was seen.

    The devices are asked here: a child process cannot ask CUDA.
    """
    spec = device_or_error(device)
    target: Device | None = None
    if tries_savings:
        try:
            target = _device_to_compare_on(device, settings.capacity_bytes_on(device))
        except Exception as error:  # drivers fail in many ways, and training goes on
            _warn_not_compared(error)
    memory = None if target is None else local_memory(target)

    def plan(target: Device, say: Callable[[str], None]) -> Plan | None:
        from memcallback.savings.what_if import plan_here

        try:
            _, found = plan_here(
                make_step(),
                device=target,
                memory=memory,
                headroom=settings.headroom,
                progress=report_progress(
                    lambda part: say(f"Trying savings: {part}."), of="predictions"
                ),
            )
            return found
        except ENDS as error:  # a model can fail on fake tensors, and training goes on
            raise_if_meant(error)
            _warn_not_compared(error)
            return None

    def compare(prediction: StepPrediction | None, say: Callable[[str], None]) -> Compared:
        if not isinstance(prediction, Prediction):
            return Compared(None, None if target is None else plan(target, say), None)
        without = savings.predict_without(make_step, spec)
        found = None if target is None else plan(target, say)
        validated = None if validation is None else validation(prediction.device)
        without, validated = (
            one and begun_with(one, prediction.at_start) for one in (without, validated)
        )
        return Compared(without, found, validated)

    return compare


def _device_to_compare_on(device: torch.device, capacity_bytes: int | None) -> Device:
    """The training's device, with another capacity if one is given."""
    if device.type == "cpu":
        host_bytes = cpu_memory().capacity_bytes if capacity_bytes is None else capacity_bytes
        return HostSpec(capacity_bytes=host_bytes)
    here = resolve(device)
    if capacity_bytes is None:
        return here
    assert isinstance(here, DeviceSpec)
    # What others use of the device does not count against a capacity that was given.
    return replace(here, capacity_bytes=capacity_bytes, local_index=None)


def _warn_not_compared(error: BaseException) -> None:
    warn_and_go_on(
        f"No savings could be tried. {reason_of(error)} MemoryCallback(what_if=False) leaves "
        "them out."
    )
