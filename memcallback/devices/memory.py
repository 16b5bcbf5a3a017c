"""How much memory of a device is used, by this process and by others: CUDA, CPU, cgroups."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from memcallback.core.control_groups import group_memory
from memcallback.core.step_memory import DeviceMemory
from memcallback.core.units import KiB
from memcallback.devices.nvml import chip_state, handle_of, initialised, reason_of, used_bytes


def device_memory(device: torch.device, *, reserved_bytes: int | None = None) -> DeviceMemory:
    """Read a whole device. It takes up to milliseconds: for logging steps, not for every step."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) if reserved_bytes is None else reserved_bytes
        return replace(cuda_memory(device), reserved_bytes=reserved)
    if device.type == "cpu":
        return cpu_memory()
    return DeviceMemory(
        unavailable=f"of a device of type {device.type!r} only the allocator can be read"
    )


def cuda_memory(device: torch.device) -> DeviceMemory:
    """Read a CUDA device from NVML, else from the CUDA driver, which does not know processes."""
    properties = torch.cuda.get_device_properties(device)
    try:
        nvml = initialised()
        handle = handle_of(nvml, str(properties.uuid))
        whole = DeviceMemory(
            capacity_bytes=properties.total_memory,
            used_bytes=used_bytes(nvml, handle),
            **asdict(chip_state(nvml, handle)),
        )
    except Exception as error:  # drivers fail in many ways, and training must go on
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(
            capacity_bytes=total,
            used_bytes=total - free,
            unavailable=f"NVML is not available: {reason_of(error)}",
        )
    try:
        own, others = _by_process(nvml, handle)
    except Exception as error:  # as above: what is known of the device stays
        return replace(whole, unavailable=f"memory by process is unknown: {reason_of(error)}")
    if own is None:
        return replace(
            whole,
            unavailable="this process is not in NVML's list (as in containers with their own "
            "process numbers)",
        )
    return replace(whole, this_process_bytes=own, other_processes_bytes=others)


def _by_process(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Bytes of this process and of all others; None if NVML does not know a process or its size."""
    own: int | None = None
    others: int | None = 0
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        size = process.usedGpuMemory
        if process.pid == os.getpid():
            own = size
        else:
            others = None if size is None or others is None else others + size
    return own, others


_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESIDENT = re.compile(rb"(VmHWM|VmRSS):\s+(\d+) kB")
_AVAILABLE = re.compile(rb"MemAvailable:\s+(\d+) kB")


def resident_bytes() -> tuple[int | None, int | None]:
    """The process's resident size and its peak since the last reset; None without /proc."""
    try:
        sizes = dict(_RESIDENT.findall(_read("/proc/self/status")))
    except OSError:
        return None, None
    now, peak = sizes.get(b"VmRSS"), sizes.get(b"VmHWM")
    return (int(now) * KiB if now else None), (int(peak) * KiB if peak else None)


def _read(path: str) -> bytes:
    """A short file of the kernel's. Every sampled step reads some, and Python's files take long."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(number, 65_536)
    finally:
        os.close(number)


def can_reset_peak_resident() -> bool:
    """Whether Linux lets a process reset the peak of its resident size."""
    return _CLEAR_REFS.exists()


def reset_peak_resident() -> None:
    """Start a new peak of the resident size, where the process may."""
    with suppress(OSError):
        number = os.open(_CLEAR_REFS, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(number, b"5")
        finally:
            os.close(number)


def cpu_memory() -> DeviceMemory:
    """Read the machine's memory, or that of a container with a smaller limit."""
    resident, _ = resident_bytes()
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return DeviceMemory(
            this_process_bytes=resident,
            unavailable="the operating system does not report how much memory it has",
        )
    capacity, used = physical, None
    group = group_memory()
    if group is not None and group.limit_bytes < physical:
        capacity, used = group.limit_bytes, min(group.used_bytes, group.limit_bytes)
    else:
        with suppress(OSError):
            if found := _AVAILABLE.search(_read("/proc/meminfo")):
                used = max(0, physical - int(found[1]) * KiB)
    if used is None:
        return DeviceMemory(
            capacity_bytes=capacity,
            this_process_bytes=resident,
            unavailable="/proc/meminfo cannot be read",
        )
    return DeviceMemory(
        capacity_bytes=capacity,
        used_bytes=used,
        this_process_bytes=resident,
        other_processes_bytes=max(0, used - resident) if resident is not None else None,
    )


def limit_bytes(device: torch.device) -> int | None:
    """What the allocator may reserve if `torch.cuda.set_per_process_memory_fraction` limits it."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if device.type != "cuda" or read is None or not torch.cuda.is_initialized():
        return None  # setting a limit initialises CUDA
    index = torch.cuda.current_device() if device.index is None else device.index
    fraction = read(index)
    if fraction >= 1:
        return None
    return int(fraction * torch.cuda.get_device_properties(index).total_memory)


def usable_bytes(
    device: torch.device, capacity_bytes: int | None, outside_bytes: int
) -> int | None:
    """The device's capacity, or, if smaller, the allocator's limit plus other use."""
    limit = limit_bytes(device)
    if limit is None or capacity_bytes is None:
        return capacity_bytes
    return min(capacity_bytes, limit + outside_bytes)
