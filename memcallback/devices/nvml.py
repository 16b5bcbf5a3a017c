"""NVML, thinly wrapped. A query takes tens of microseconds to milliseconds and needs a driver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

#: Where drivers put their devices: NVIDIA's, also of Jetson and WSL, and AMD's.
_DEVICE_FILES = ("nvidia[0-9]*", "nvmap", "dxg", "kfd")


def has_device_file() -> bool:
    """Whether the driver of a GPU may be there: on Linux its device has a file."""
    if sys.platform != "linux":
        return True
    return any(any(Path("/dev").glob(name)) for name in _DEVICE_FILES)


@lru_cache(maxsize=1)
def initialised() -> Any:
    """The module pynvml, initialised."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def handle_of(nvml: Any, uuid: str) -> Any:
    """A device by UUID: CUDA_VISIBLE_DEVICES renumbers CUDA's devices, but not NVML's."""
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return nvml.nvmlDeviceGetHandleByUUID(name)


def used_bytes(nvml: Any, handle: Any) -> int:
    """Used memory of a device, without the driver's own."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
    except nvml.NVMLError_FunctionNotFound:
        # Drivers before 510 have only the first version, which includes the driver's own memory.
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)


@dataclass(frozen=True, kw_only=True)
class ChipState:
    """What the chip does now. Values that the driver does not report are None.

    Attributes:
        utilisation_pct: The recent share of time in which a kernel ran, 0 to 100.
        temperature_celsius: Its temperature.
        power_watts: Its power draw.
    """

    utilisation_pct: int | None
    temperature_celsius: int | None
    power_watts: float | None


def chip_state(nvml: Any, handle: Any) -> ChipState:
    """Read a chip; the driver reports little for a MIG slice."""
    milliwatts = query(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return ChipState(
        utilisation_pct=query(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        temperature_celsius=query(
            lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        power_watts=None if milliwatts is None else milliwatts / 1000,
    )


def query(ask: Callable[[], Any]) -> Any:
    """The driver's answer; None if it has none for this device."""
    try:
        return ask()
    except Exception:  # any single function may be missing or refused
        return None


def reason_of(error: Exception) -> str:
    """Why NVML fails, for a message."""
    if isinstance(error, ModuleNotFoundError):
        return "the module pynvml is missing (pip install nvidia-ml-py)"
    return f"{type(error).__name__}: {error}"
