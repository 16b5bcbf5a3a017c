"""Meters read a device's memory at the boundaries of phases: AllocatorMeter and CpuMeter."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch

from memcallback.core.errors import warn_and_go_on
from memcallback.core.step_memory import Holdings, MemoryStats
from memcallback.core.torch_private import RecordFunction, is_profiler_on
from memcallback.devices.memory import (
    can_reset_peak_resident,
    reset_peak_resident,
    resident_bytes,
)


class Meter(Protocol):
    """Reads one device while a step runs: `begin`, then `read` and `mark`, then `end`.

    Attributes:
        source: Where the values come from, such as `CUDA caching allocator`.
        device: The device that is read.
        device_name: Its name.
        reads_every_step: Whether reading is cheap enough for every step; else steps are sampled.
    """

    source: str
    device: torch.device
    device_name: str
    reads_every_step: bool

    def begin(self) -> None:
        """Begin a step."""

    def read(self, held: Holdings | None) -> None:
        """Read all values at a boundary, and the peaks since the previous one."""

    def mark(self) -> None:
        """Read allocated memory and its peak between two boundaries, as cheaply as possible."""

    def end(self) -> tuple[MemoryStats, ...]:
        """End the step; one entry for each `read` and `mark` since `begin`."""


class MeterUnavailableError(RuntimeError):
    """The device has no memory statistics."""


class AllocatorMeter:
    """Reads PyTorch's caching allocator on CUDA, or on another device through torch.accelerator.

    Its counters are kept on the host, so that reading them waits for no kernel.
    """

    reads_every_step = True

    def __init__(self, device: torch.device, *, reset_peaks: bool = True) -> None:
        self.device = device
        self._index: torch.device | int = device
        self._reset_peaks = reset_peaks
        self._readings: list[tuple[Mapping[str, Any], Holdings | None] | MemoryStats] = []
        if device.type == "cuda":
            self.source = "CUDA caching allocator"
            self.device_name = torch.cuda.get_device_name(device)
            # memory_stats() would flatten and sort about 123 keys on top of the same read.
            self._read: Callable[[torch.device | int], Mapping[str, Any]] = (
                torch.cuda.memory_stats_as_nested_dict
            )
            self._reset: Callable[[torch.device | int], None] = torch.cuda.reset_peak_memory_stats
            self._value = _nested_value
            # PyTorch takes longer to convert a torch.device than to reset the peaks.
            self._index = device if device.index is None else device.index
            return
        accelerator = torch.accelerator
        if not hasattr(accelerator, "memory_stats"):
            raise MeterUnavailableError(
                f"Memory of the device {str(device)!r} cannot be read with PyTorch "
                f"{torch.__version__}: torch.accelerator.memory_stats is missing. Use PyTorch 2.9 "
                "or later."
            )
        try:
            accelerator.memory_stats(device)
        except (RuntimeError, NotImplementedError) as error:
            raise MeterUnavailableError(
                f"Memory of the device {str(device)!r} cannot be read: "
                f"torch.accelerator.memory_stats failed with {str(error)!r}. Train on a device "
                "with allocator statistics to see its memory."
            ) from error
        self.source = f"{device.type} allocator"
        self.device_name = str(device)
        self._read = accelerator.memory_stats
        self._reset = accelerator.reset_peak_memory_stats
        self._value = _flat_value

    def begin(self) -> None:
        """Begin a step."""
        self._readings = []

    def read(self, held: Holdings | None) -> None:
        """Read at a boundary."""
        self._readings.append((self._read(self._index), held))
        if self._reset_peaks:
            self._reset(self._index)

    def mark(self) -> None:
        """Read between two boundaries."""
        raw, value = self._read(self._index), self._value
        self._readings.append(
            MemoryStats(
                allocated_bytes=value(raw, "allocated_bytes", "current"),
                reserved_bytes=value(raw, "reserved_bytes", "current"),
                peak_allocated_bytes=value(raw, "allocated_bytes", "peak"),
                peak_reserved_bytes=value(raw, "reserved_bytes", "peak"),
            )
        )
        if self._reset_peaks:
            self._reset(self._index)

    def end(self) -> tuple[MemoryStats, ...]:
        """End the step."""
        stats = tuple(
            reading if isinstance(reading, MemoryStats) else _memory_stats(*reading, self._value)
            for reading in self._readings
        )
        return stats if self._reset_peaks else _only_new_peaks(stats)


def _nested_value(raw: Mapping[str, Any], name: str, which: str) -> int | None:
    return raw[name]["all"][which] if name in raw else None


def _flat_value(raw: Mapping[str, Any], name: str, which: str) -> int | None:
    return raw.get(f"{name}.all.{which}")


def _memory_stats(
    raw: Mapping[str, Any],
    held: Holdings | None,
    value: Callable[[Mapping[str, Any], str, str], int | None],
) -> MemoryStats:
    return MemoryStats(
        allocated_bytes=value(raw, "allocated_bytes", "current"),
        reserved_bytes=value(raw, "reserved_bytes", "current"),
        active_bytes=value(raw, "active_bytes", "current"),
        inactive_split_bytes=value(raw, "inactive_split_bytes", "current"),
        requested_bytes=value(raw, "requested_bytes", "current"),
        peak_allocated_bytes=value(raw, "allocated_bytes", "peak"),
        peak_reserved_bytes=value(raw, "reserved_bytes", "peak"),
        num_allocations=value(raw, "allocation", "current"),
        num_alloc_retries=raw.get("num_alloc_retries"),
        num_ooms=raw.get("num_ooms"),
        by_category=held.by_category if held else None,
    )


def _only_new_peaks(stats: tuple[MemoryStats, ...]) -> tuple[MemoryStats, ...]:
    """Drop peaks that did not rise: without resets they may be older than the last reading."""
    result = list(stats[:1])
    for earlier, later in pairwise(stats):
        allocated, reserved = later.peak_allocated_bytes, later.peak_reserved_bytes
        result.append(
            replace(
                later,
                peak_allocated_bytes=None
                if allocated == earlier.peak_allocated_bytes
                else allocated,
                peak_reserved_bytes=None if reserved == earlier.peak_reserved_bytes else reserved,
            )
        )
    return tuple(result)


#: Name of the profiler event that a boundary leaves.
_BOUNDARY = "memcallback::boundary"


class CpuMeter:
    """Reads bytes live in CPU storages at each boundary of a sampled step, and the resident size.

    PyTorch keeps no counters for CPU memory. Its profiler reports every allocation and release,
    which costs too much for every step. What the model, optimizers and batch hold is counted when
    the step begins; other older tensors are left out. Only the resident size is read if somebody
    else uses the profiler, or if nothing is known of the training.
    """

    source = "CPU allocation events"
    device_name = "CPU"
    reads_every_step = False

    def __init__(self, *, reset_peaks: bool = True, use_profiler: bool = True) -> None:
        self.device = torch.device("cpu")
        self._reset_peaks = reset_peaks and can_reset_peak_resident()
        self._use_profiler = use_profiler
        self._has_warned = False
        self._profiler: torch.autograd.profiler.profile | None = None
        self._readings: list[tuple[Holdings | None, int | None, int | None]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._readings = []
        self._profiler = None
        if not self._use_profiler:
            return
        if not _is_profiler_in_use():
            self._profiler = _start_profiler()
        elif not self._has_warned:
            self._has_warned = True
            warn_and_go_on(
                "A profile of PyTorch is running or prepared, and only one can run at a time: "
                "meanwhile only the resident size of the process is recorded on this CPU. Train "
                "without the profiler to see allocated memory."
            )

    def read(self, held: Holdings | None) -> None:
        """Read at a boundary."""
        with torch.autograd.profiler.record_function(_BOUNDARY):
            pass
        resident, peak = resident_bytes()
        self._readings.append((held, resident, peak if self._reset_peaks else None))
        if self._reset_peaks:
            reset_peak_resident()

    def mark(self) -> None:
        """Read between two boundaries."""
        # Like record_function, at a tenth of its cost and without an operator. The resident size
        # is not read here.
        with RecordFunction(_BOUNDARY):
            pass
        self._readings.append((None, None, None))

    def end(self) -> tuple[MemoryStats, ...]:
        """End the step."""
        sections = list(_sections(_stop_profiler(self._profiler)))
        self._profiler = None
        held = [reading[0] for reading in self._readings]
        counted: list[tuple[int | None, int | None]] = [(None, None)] * len(held)
        if held and held[0] is not None and len(held) == len(sections):
            counted = list(_live(held[0], held, sections))
        return tuple(
            MemoryStats(
                allocated_bytes=allocated,
                peak_allocated_bytes=peak,
                resident_bytes=resident,
                peak_resident_bytes=peak_resident,
                by_category=held.by_category if held else None,
            )
            for (held, resident, peak_resident), (allocated, peak) in zip(
                self._readings, counted, strict=True
            )
        )


@dataclass(frozen=True)
class _Allocation:
    """An allocation; with a negative size, a release."""

    address: int
    size_bytes: int


def _is_profiling() -> bool:
    return bool(is_profiler_on())


def _is_profiler_in_use() -> bool:
    """Whether a profile runs, or waits for its schedule, which only the profile object shows.

    Two profiles at a time crash PyTorch 2.13. This searches all objects of the process.
    """
    scheduled, single = torch.profiler.profile, torch.autograd.profiler.profile
    for profile in gc.get_referrers(scheduled, single):
        # One with a schedule may begin again at any step; another has results once it has ended.
        if isinstance(profile, scheduled) and profile.record_steps:
            return True
        if isinstance(profile, single) and profile.kineto_results is None:
            return True
    return _is_profiling()


def _start_profiler() -> torch.autograd.profiler.profile:
    profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    # PyTorch 2.13 prints two lines to stderr for each profile unless this is set when its profiler
    # is first used.
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
    """The profile's events by time; none without a profiler, or if somebody else has ended it."""
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
    """The allocations between one boundary and the next, for each boundary."""
    section: list[_Allocation] = []
    for event in events:
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            if fields.device.type == "cpu":
                section.append(_Allocation(fields.ptr, fields.alloc_size))
        elif event.name == _BOUNDARY:
            yield section
            section = []


def _live(
    first: Holdings, held: list[Holdings | None], sections: list[list[_Allocation]]
) -> Iterator[tuple[int, int]]:
    """Live bytes at each reading, and their peak since the reading before.

    PyTorch reports the release of a storage only if its allocation was profiled too. So a storage
    that is older than the step counts until its release is reported, its address is reused, or a
    boundary finds it no longer held.
    """
    older = dict(first.storages)
    younger: dict[int, int] = {}
    live = sum(older.values())
    for position, (now, section) in enumerate(zip(held, sections, strict=True)):
        if position == 0:
            # What came before the first boundary belongs to no phase, and is in `older` if held.
            yield live, live
            continue
        peak = live
        for event in section:
            if event.size_bytes > 0:
                live -= older.pop(event.address, 0)
                younger[event.address] = event.size_bytes
                live += event.size_bytes
                peak = max(peak, live)
            else:
                live -= younger.pop(event.address, 0) or older.pop(event.address, 0)
        if now is not None:
            for address in [address for address in older if address not in now.storages]:
                live -= older.pop(address)
        yield live, peak
