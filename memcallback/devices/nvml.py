"""Thin NVML helpers.

NVML answers a question in tens of microseconds to milliseconds and needs a driver; nothing here
raises for want of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def initialised() -> Any:
    """The module pynvml, ready to be asked."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def handle_of(nvml: Any, uuid: str) -> Any:
    """By UUID, since CUDA_VISIBLE_DEVICES renumbers CUDA's devices and not NVML's."""
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return nvml.nvmlDeviceGetHandleByUUID(name)


def used_bytes(nvml: Any, handle: Any) -> int:
    """What is used of a device's memory, without what the driver keeps for itself."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
    except nvml.NVMLError_FunctionNotFound:
        # Drivers before 510 have the first version only, whose figure includes what the driver
        # keeps for itself.
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)


@dataclass(frozen=True, kw_only=True)
class ChipState:
    """What the chip is doing at this moment. What the driver does not tell is None.

    Attributes:
        utilisation_pct: The share of the last moments in which a kernel ran, 0 to 100.
        temperature_celsius: Its temperature.
        power_watts: What it draws.
    """

    utilisation_pct: int | None
    temperature_celsius: int | None
    power_watts: float | None


def chip_state(nvml: Any, handle: Any) -> ChipState:
    """Ask for a device's chip; of a MIG slice little is told."""
    milliwatts = asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return ChipState(
        utilisation_pct=asked(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        temperature_celsius=asked(
            lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        power_watts=None if milliwatts is None else milliwatts / 1000,
    )


def asked(ask: Callable[[], Any]) -> Any:
    """What the driver says; None if it does not know, or does not do that for this device."""
    try:
        return ask()
    except Exception:  # each function may be missing or refused by itself
        return None


def reason_of(error: Exception) -> str:
    """Why NVML does not answer, in words."""
    if isinstance(error, ModuleNotFoundError):
        return "the module pynvml is missing (pip install nvidia-ml-py)"
    return f"{type(error).__name__}: {error}"
