"""How much of a device is used, by this process and by others (CUDA, CPU, cgroups)."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from memcallback.core.step_memory import DeviceMemory
from memcallback.core.units import KiB
from memcallback.devices.nvml import chip_state, handle_of, initialised, reason_of, used_bytes


def cuda_memory(device: torch.device) -> DeviceMemory:
    """A CUDA device as NVML sees it; without NVML, as the CUDA driver does, which cannot tell
    processes apart.
    """
    properties = torch.cuda.get_device_properties(device)
    try:
        nvml = initialised()
        handle = handle_of(nvml, str(properties.uuid))
        whole = DeviceMemory(
            capacity_bytes=properties.total_memory,
            used_bytes=used_bytes(nvml, handle),
            **asdict(chip_state(nvml, handle)),
        )
    except Exception as error:  # whatever is wrong with a driver, training goes on
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(
            capacity_bytes=total,
            used_bytes=total - free,
            unavailable=f"NVML is not available: {reason_of(error)}",
        )
    try:
        own, others = _by_process(nvml, handle)
    except Exception as error:
        return replace(whole, unavailable=f"no figures by process: {reason_of(error)}")
    if own is None:
        return replace(
            whole,
            unavailable="this process is not in NVML's list, as in a container with process numbers of its own",
        )
    return replace(whole, this_process_bytes=own, other_processes_bytes=others)


def _by_process(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Bytes of this process and of the others; None where NVML lists a process without a figure, or
    not at all.
    """
    own: int | None = None
    others: int | None = 0
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        size = process.usedGpuMemory
        if process.pid == os.getpid():
            own = size
        else:
            others = None if size is None or others is None else others + size
    return own, others


_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESIDENT = re.compile(r"^(VmHWM|VmRSS):\s+(\d+) kB", re.MULTILINE)


def resident_bytes() -> tuple[int | None, int | None]:
    """The process's resident size now, and its largest since the last reset; None where there is no
    /proc.
    """
    try:
        found = dict(_RESIDENT.findall(_STATUS.read_text()))
    except OSError:
        return None, None
    now, peak = found.get("VmRSS"), found.get("VmHWM")
    return (int(now) * KiB if now else None), (int(peak) * KiB if peak else None)


def _reset_peak_resident() -> None:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return


def cpu_memory() -> DeviceMemory:
    """The machine's memory: capacity is what this process may use, the smaller of physical memory
    and its cgroup's limit.
    """
    resident, _ = resident_bytes()
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return DeviceMemory(
            this_process_bytes=resident,
            unavailable="the operating system does not tell how much memory it has",
        )
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = physical
    try:
        available = (
            int(
                dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))[
                    "MemAvailable"
                ]
            )
            * KiB
        )
    except (OSError, KeyError):
        return DeviceMemory(
            capacity_bytes=min(physical, limit),
            this_process_bytes=resident,
            unavailable="/proc/meminfo cannot be read",
        )
    used = physical - available
    return DeviceMemory(
        capacity_bytes=min(physical, limit),
        used_bytes=used,
        this_process_bytes=resident,
        other_processes_bytes=max(0, used - resident) if resident is not None else None,
    )


def device_memory(device: torch.device, *, reserved_bytes: int | None = None) -> DeviceMemory:
    """A whole device, as its driver or the operating system sees it; for logging steps, not for
    every step.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) if reserved_bytes is None else reserved_bytes
        return replace(cuda_memory(device), reserved_bytes=reserved)
    if device.type == "cpu":
        return cpu_memory()
    return DeviceMemory(
        unavailable=f"nothing is known of a device of type {device.type!r} but its allocator"
    )


def limit_bytes(device: torch.device) -> int | None:
    """What the allocator may reserve, where the program has bounded it
    (`torch.cuda.set_per_process_memory_fraction`); None where it has not.
    """
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if device.type != "cuda" or read is None or not torch.cuda.is_initialized():
        return None  # a bound opens the device
    index = torch.cuda.current_device() if device.index is None else device.index
    fraction = read(index)
    return (
        int(fraction * torch.cuda.get_device_properties(index).total_memory)
        if fraction < 1
        else None
    )


def usable_bytes(
    device: torch.device, capacity_bytes: int | None, outside_bytes: int
) -> int | None:
    """The memory to plan for: that of the device; where the program has bounded its allocator, that
    bound and what is used outside of it.
    """
    bound = limit_bytes(device)
    return (
        capacity_bytes
        if bound is None or capacity_bytes is None
        else min(capacity_bytes, bound + outside_bytes)
    )
