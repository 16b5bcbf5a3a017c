"""Meters read a device's memory at the boundaries of phases: AllocatorMeter and CpuMeter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch

from memcallback.core.errors import MissingPartError, warn_and_go_on
from memcallback.core.step_memory import Holdings, MemoryStats
from memcallback.devices.allocation_profile import AllocationProfile, Change
from memcallback.devices.memory import (
    can_reset_peak_resident,
    reset_peak_resident,
    resident_bytes,
)

#: Takes a value out of an allocator's statistics: of a name, `current` or `peak`.
_Value = Callable[[Mapping[str, Any], str, str], int | None]


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

    Its counters are kept on the host, so that reading them waits for no kernel. A meter that resets
    the peaks tells them to the other meters of the device first.
    """

    reads_every_step = True
    #: By the object's address; threads add to it while others read.
    _all: ClassVar[weakref.WeakValueDictionary[int, AllocatorMeter]] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device, *, reset_peaks: bool = True) -> None:
        self.device = device
        self._index: torch.device | int = device
        self._reset_peaks = reset_peaks
        self._readings: list[MemoryStats | Callable[[], MemoryStats]] = []
        #: The largest peaks that other meters have reset: since our last reading, if we reset too.
        self._missed: Mapping[str, int] = {}
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
            self._all[id(self)] = self
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
        self._all[id(self)] = self

    def begin(self) -> None:
        """Begin a step."""
        self._readings = []

    def read(self, held: Holdings | None) -> None:
        """Read at a boundary."""
        raw = self._read(self._index)
        self._readings.append(partial(_memory_stats, raw, held, self._value, self._missed))
        self._reset_all(raw)

    def mark(self) -> None:
        """Read between two boundaries."""
        raw, value = self._read(self._index), self._value
        self._readings.append(
            MemoryStats(
                allocated_bytes=value(raw, "allocated_bytes", "current"),
                reserved_bytes=value(raw, "reserved_bytes", "current"),
                peak_allocated_bytes=_peak(raw, value, self._missed, "allocated_bytes"),
                peak_reserved_bytes=_peak(raw, value, self._missed, "reserved_bytes"),
            )
        )
        self._reset_all(raw)

    def _reset_all(self, raw: Mapping[str, Any]) -> None:
        """Reset the peaks that have just been read, and keep them for other meters."""
        if not self._reset_peaks:
            return
        self._missed = {}
        meters = [reference() for reference in self._all.valuerefs()]
        for meter in meters:
            if meter is None or meter is self or not meter._reads_as(self):
                continue
            meter._missed = {
                name: peak
                for name in ("allocated_bytes", "reserved_bytes")
                if (peak := _peak(raw, self._value, meter._missed, name)) is not None
            }
        self._reset(self._index)

    def _reads_as(self, other: AllocatorMeter) -> bool:
        """Whether another meter reads the same device; one without an index is the current one."""
        if self.device.type != other.device.type or self.device == other.device:
            return self.device == other.device
        current = torch.accelerator.current_device_index()
        numbers = {
            current if one.device.index is None else one.device.index for one in (self, other)
        }
        return len(numbers) == 1

    def end(self) -> tuple[MemoryStats, ...]:
        """End the step."""
        stats = tuple(
            reading if isinstance(reading, MemoryStats) else reading() for reading in self._readings
        )
        return stats if self._reset_peaks else _only_new_peaks(stats)


def _nested_value(raw: Mapping[str, Any], name: str, which: str) -> int | None:
    return raw[name]["all"][which] if name in raw else None


def _flat_value(raw: Mapping[str, Any], name: str, which: str) -> int | None:
    return raw.get(f"{name}.all.{which}")


def _peak(
    raw: Mapping[str, Any], value: _Value, missed: Mapping[str, int], name: str
) -> int | None:
    """The peak of a reading, or a larger one that was reset before."""
    peak = value(raw, name, "peak")
    return peak if peak is None else max(peak, missed.get(name, 0))


def _memory_stats(
    raw: Mapping[str, Any], held: Holdings | None, value: _Value, missed: Mapping[str, int]
) -> MemoryStats:
    return MemoryStats(
        allocated_bytes=value(raw, "allocated_bytes", "current"),
        reserved_bytes=value(raw, "reserved_bytes", "current"),
        active_bytes=value(raw, "active_bytes", "current"),
        inactive_split_bytes=value(raw, "inactive_split_bytes", "current"),
        requested_bytes=value(raw, "requested_bytes", "current"),
        peak_allocated_bytes=_peak(raw, value, missed, "allocated_bytes"),
        peak_reserved_bytes=_peak(raw, value, missed, "reserved_bytes"),
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
        self._profile: AllocationProfile | None = None
        self._readings: list[tuple[Holdings | None, int | None, int | None]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._readings = []
        self._profile = self._new_profile() if self._use_profiler else None

    def _new_profile(self) -> AllocationProfile | None:
        profile = AllocationProfile()
        try:
            if profile.begin():
                return profile
            reason = (
                "A profile of PyTorch is running or prepared, and only one can run at a time: "
                "meanwhile only the resident size of the process is recorded on this CPU. Train "
                "without the profiler to see allocated memory."
            )
        except MissingPartError as error:
            reason = f"On this CPU only the resident size of the process is recorded: {error}."
        if not self._has_warned:
            self._has_warned = True
            warn_and_go_on(reason)
        return None

    def read(self, held: Holdings | None) -> None:
        """Read at a boundary."""
        self._mark()
        resident, peak = resident_bytes()
        self._readings.append((held, resident, peak if self._reset_peaks else None))
        if self._reset_peaks:
            reset_peak_resident()

    def mark(self) -> None:
        """Read between two boundaries."""
        self._mark()
        # Reading the resident size would take too long for every module.
        self._readings.append((None, None, None))

    def _mark(self) -> None:
        if self._profile is not None:
            self._profile.mark()

    def end(self) -> tuple[MemoryStats, ...]:
        """End the step."""
        profile, self._profile = self._profile, None
        sections = profile.end() if profile is not None else None
        held = [reading[0] for reading in self._readings]
        counted: list[tuple[int | None, int | None]] = [(None, None)] * len(held)
        if held and held[0] is not None and sections is not None:
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


def _live(
    first: Holdings, held: list[Holdings | None], sections: list[list[Change]]
) -> Iterator[tuple[int, int]]:
    """Live bytes at each reading, and their peak since the reading before.

    PyTorch reports the release of a storage only if its allocation was profiled too. So a storage
    that is older than the step counts until its release is reported, its address is reused, or a
    boundary finds it no longer held. One that another thread releases, as Gloo's do, counts until
    its address is reused: only the step's own thread is profiled.
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
        for address, num_bytes in section:
            if num_bytes > 0:
                live += num_bytes - older.pop(address, 0) - younger.pop(address, 0)
                younger[address] = num_bytes
                peak = max(peak, live)
            else:
                live -= younger.pop(address, 0) or older.pop(address, 0)
        if now is not None:
            for address in [address for address in older if address not in now.storages]:
                live -= older.pop(address)
        yield live, peak
