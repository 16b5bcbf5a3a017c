"""Memory of a step on a CPU: PyTorch's own allocation events, and the process's resident size.

PyTorch keeps no counters for CPU memory. Its profiler reports every allocation and release, which costs too much for
every step, so only sampled ones are read.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memcallback.holdings import Holdings
from memcallback.stats import DeviceMemory, MemoryStats
from memcallback.units import KiB
from memcallback.warn import warn_and_go_on

_BOUNDARY = "memcallback::boundary"
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESIDENT = re.compile(r"^(VmHWM|VmRSS):\s+(\d+) kB", re.MULTILINE)


class CpuMeter:
    """Bytes alive in storages at each boundary of a sampled step, the largest between them, and the resident size.

    What the training holds when the step begins is counted from its model, optimizers and batch; what the step itself
    allocates and releases comes from the profiler's events. Other tensors that are older than the step do not count.
    Where the profiler is in use by somebody else, prepared for it, or nothing is known of the training, only the resident size is read.

    Args:
        reset_peaks: Reset the kernel's record of the process's largest resident size (VmHWM) at each boundary. With
            False a phase's largest resident size is unknown.
        use_profiler: Whether to read allocations; else only the resident size is read.
    """

    source = "CPU allocation events"
    device_name = "CPU"
    reads_every_step = False

    def __init__(self, *, reset_peaks: bool = True, use_profiler: bool = True) -> None:
        self.device = torch.device("cpu")
        self._reset_peaks = reset_peaks and _CLEAR_REFS.exists()
        self._use_profiler = use_profiler
        self._has_warned = False
        self._profiler: torch.autograd.profiler.profile | None = None
        self._readings: list[tuple[Holdings | None, int | None, int | None]] = []

    def begin(self) -> None:
        """A step begins."""
        self._readings = []
        self._profiler = None
        if not self._use_profiler:
            return
        if not _is_somebody_else_profiling():
            self._profiler = _start_profiler()
        elif not self._has_warned:
            self._has_warned = True
            warn_and_go_on(
                "A profile of PyTorch is running or prepared, and there can be one at a time: on this CPU only the resident size of the process "
                "is recorded meanwhile. Train without the profiler to see allocated memory."
            )

    def read(self, held: Holdings | None) -> None:
        """A boundary."""
        with torch.autograd.profiler.record_function(_BOUNDARY):
            pass
        resident, peak = resident_bytes()
        self._readings.append((held, resident, peak if self._reset_peaks else None))
        if self._reset_peaks:
            _reset_peak_resident()

    def mark(self) -> None:
        """A moment between two boundaries: the resident size is not read."""
        # What record_function does, at a tenth of its cost and without an operator.
        with torch._C._profiler._RecordFunctionFast(_BOUNDARY):
            pass
        self._readings.append((None, None, None))

    def end(self) -> tuple[MemoryStats, ...]:
        """The step is over."""
        sections = list(_sections(_stop_profiler(self._profiler)))
        self._profiler = None
        held = [reading[0] for reading in self._readings]
        counted: list[tuple[int | None, int | None]] = [(None, None)] * len(held)
        if held and held[0] is not None and len(held) == len(sections):
            counted = list(_alive(held[0], held, sections))
        return tuple(
            MemoryStats(
                allocated_bytes=allocated,
                peak_allocated_bytes=peak,
                resident_bytes=resident,
                peak_resident_bytes=peak_resident,
                by_category=held.by_category if held else None,
            )
            for (held, resident, peak_resident), (allocated, peak) in zip(self._readings, counted, strict=True)
        )


@dataclass(frozen=True)
class _Allocation:
    """An allocation, or with a negative size a release."""

    address: int
    size_bytes: int


def _is_profiling() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def _is_somebody_else_profiling() -> bool:
    """Whether there is a profile that has begun or is about to: one that a schedule has prepared shows in its object alone.

    A second profile beside a prepared one ends in a crash of PyTorch 2.13. The search goes through all objects of the process.
    """
    scheduled, single = torch.profiler.profile, torch.autograd.profiler.profile
    for found in gc.get_referrers(scheduled, single):
        # One with a schedule may begin again at any step; one without has results once it has ended.
        if isinstance(found, scheduled) and found.record_steps:
            return True
        if isinstance(found, single) and found.kineto_results is None:
            return True
    return _is_profiling()


def _start_profiler() -> torch.autograd.profiler.profile:
    profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    # PyTorch 2.13 prints two lines to stderr for each profile unless this is set when its profiler is first used.
    is_unset = "KINETO_LOG_LEVEL" not in os.environ
    if is_unset:
        os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        profiler.__enter__()
    finally:
        if is_unset:
            del os.environ["KINETO_LOG_LEVEL"]
    return profiler


def _stop_profiler(profiler: torch.autograd.profiler.profile | None) -> list[Any]:
    """The profile's events in the order of time; none if there is no profiler or somebody else has ended it."""
    if profiler is None or not _is_profiling():
        return []
    profiler.__exit__(None, None, None)
    results = profiler.kineto_results
    events: list[Any] = []
    pending = list(results.experimental_event_tree()) if results else []
    while pending:
        event = pending.pop()
        events.append(event)
        pending.extend(event.children)
    return sorted(events, key=lambda event: event.start_time_ns)


def _sections(events: Iterable[Any]) -> Iterator[list[_Allocation]]:
    """The allocations before each boundary, since the one before it."""
    from torch._C._profiler import _EventType

    section: list[_Allocation] = []
    for event in events:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                section.append(_Allocation(fields.ptr, fields.alloc_size))
        elif event.name == _BOUNDARY:
            yield section
            section = []


def _alive(first: Holdings, held: list[Holdings | None], sections: list[list[_Allocation]]) -> Iterator[tuple[int, int]]:
    """Bytes alive at each reading, and the most since the reading before it.

    PyTorch reports the release of a storage only if its allocation was profiled too. So a storage that was held when the
    step began counts until its release is reported, its address is given to another one, or a boundary sees it held no longer.
    """
    older = dict(first.storages)
    younger: dict[int, int] = {}
    alive = sum(older.values())
    for position, (now, section) in enumerate(zip(held, sections, strict=True)):
        if position == 0:
            # Whatever the profiler saw before the first boundary belongs to no phase, and is in `older` if it is held.
            yield alive, alive
            continue
        peak = alive
        for event in section:
            if event.size_bytes > 0:
                alive -= older.pop(event.address, 0)
                younger[event.address] = event.size_bytes
                alive += event.size_bytes
                peak = max(peak, alive)
            else:
                alive -= younger.pop(event.address, 0) or older.pop(event.address, 0)
        if now is not None:
            for address in [address for address in older if address not in now.storages]:
                alive -= older.pop(address)
        yield alive, peak


def resident_bytes() -> tuple[int | None, int | None]:
    """The process's resident size now, and its largest since the last reset; None where there is no /proc."""
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
    """The machine's memory: capacity is what this process may use, the smaller of physical memory and its cgroup's limit."""
    resident, _ = resident_bytes()
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return DeviceMemory(this_process_bytes=resident, unavailable="the operating system does not tell how much memory it has")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = physical
    try:
        available = int(dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))["MemAvailable"]) * KiB
    except (OSError, KeyError):
        return DeviceMemory(capacity_bytes=min(physical, limit), this_process_bytes=resident, unavailable="/proc/meminfo cannot be read")
    used = physical - available
    return DeviceMemory(
        capacity_bytes=min(physical, limit),
        used_bytes=used,
        this_process_bytes=resident,
        other_processes_bytes=max(0, used - resident) if resident is not None else None,
    )
