"""Meters that read allocator statistics at phase boundaries: AllocatorMeter, CpuMeter.

PyTorch keeps no counters for CPU memory. Its profiler reports every allocation and release, which
costs too much for every step, so only sampled ones are read.
"""

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
from memcallback.devices.memory import _CLEAR_REFS, _reset_peak_resident, resident_bytes

_BOUNDARY = "memcallback::boundary"


class CpuMeter:
    """Bytes alive in storages at each boundary of a sampled step, the largest between them, and the
    resident size.

    What the training holds when the step begins is counted from its model, optimizers and batch;
    what the step itself allocates and releases comes from the profiler's events. Other tensors that
    are older than the step do not count. Where the profiler is in use by somebody else, prepared
    for it, or nothing is known of the training, only the resident size is read.
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
            for (held, resident, peak_resident), (allocated, peak) in zip(
                self._readings, counted, strict=True
            )
        )


@dataclass(frozen=True)
class _Allocation:
    """An allocation, or with a negative size a release."""

    address: int
    size_bytes: int


def _is_profiling() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def _is_somebody_else_profiling() -> bool:
    """Whether there is a profile that has begun or is about to: one that a schedule has prepared
    shows in its object alone.

    A second profile beside a prepared one ends in a crash of PyTorch 2.13. The search goes through
    all objects of the process.
    """
    scheduled, single = torch.profiler.profile, torch.autograd.profiler.profile
    for found in gc.get_referrers(scheduled, single):
        # One with a schedule may begin again at any step; one without has results once it has
        # ended.
        if isinstance(found, scheduled) and found.record_steps:
            return True
        if isinstance(found, single) and found.kineto_results is None:
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
    """The profile's events in the order of time; none if there is no profiler or somebody else has
    ended it.
    """
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


def _alive(
    first: Holdings, held: list[Holdings | None], sections: list[list[_Allocation]]
) -> Iterator[tuple[int, int]]:
    """Bytes alive at each reading, and the most since the reading before it.

    PyTorch reports the release of a storage only if its allocation was profiled too. So a storage
    that was held when the step began counts until its release is reported, its address is given to
    another one, or a boundary sees it held no longer.
    """
    older = dict(first.storages)
    younger: dict[int, int] = {}
    alive = sum(older.values())
    for position, (now, section) in enumerate(zip(held, sections, strict=True)):
        if position == 0:
            # Whatever the profiler saw before the first boundary belongs to no phase, and is in
            # `older` if it is held.
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


class Meter(Protocol):
    """What a recorder needs of a device.

    Attributes:
        source: What gives the figures, such as `CUDA caching allocator`.
        device: The device that is read.
        device_name: Its name.
        reads_every_step: Whether a step costs so little that every one is read; else only sampled
            ones are.
    """

    source: str
    device: torch.device
    device_name: str
    reads_every_step: bool

    def begin(self) -> None:
        """A step begins."""

    def read(self, held: Holdings | None) -> None:
        """A boundary: note the figures of this moment and the peaks since the previous boundary."""

    def mark(self) -> None:
        """A moment between two boundaries: note what is allocated and its peak since the reading
        before, at the least cost.
        """

    def end(self) -> tuple[MemoryStats, ...]:
        """The step is over: one entry for each `read` and `mark` since `begin`."""


class MeterUnavailableError(RuntimeError):
    """This device cannot be read; the text says why and what to do."""


class AllocatorMeter:
    """PyTorch's caching allocator on CUDA, or any other accelerator that torch.accelerator can ask.

    A boundary is one read of the allocator's counters, which are bookkeeping of the host: no kernel
    is waited for.
    """

    reads_every_step = True

    def __init__(self, device: torch.device, *, reset_peaks: bool = True) -> None:
        self.device = device
        self._place: torch.device | int = device
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
            self._figure = _nested_figure
            # PyTorch takes longer to look at a torch.device than to reset the peaks.
            self._place = device if device.index is None else device.index
            return
        accelerator = torch.accelerator
        if not hasattr(accelerator, "memory_stats"):
            raise MeterUnavailableError(
                f"Memory of the device {str(device)!r} cannot be read with PyTorch {torch.__version__}: torch.accelerator.memory_stats "
                "is missing. Use PyTorch 2.9 or later."
            )
        try:
            accelerator.memory_stats(device)
        except (RuntimeError, NotImplementedError) as error:
            raise MeterUnavailableError(
                f"Memory of the device {str(device)!r} cannot be read: torch.accelerator.memory_stats says {str(error)!r}. "
                "Train on a device whose allocator keeps statistics to see its memory."
            ) from error
        self.source = f"{device.type} allocator"
        self.device_name = str(device)
        self._read = accelerator.memory_stats
        self._reset = accelerator.reset_peak_memory_stats
        self._figure = _flat_figure

    def begin(self) -> None:
        """A step begins."""
        self._readings = []

    def read(self, held: Holdings | None) -> None:
        """A boundary."""
        self._readings.append((self._read(self._place), held))
        if self._reset_peaks:
            self._reset(self._place)

    def mark(self) -> None:
        """A moment between two boundaries."""
        raw, figure = self._read(self._place), self._figure
        self._readings.append(
            MemoryStats(
                allocated_bytes=figure(raw, "allocated_bytes", "current"),
                reserved_bytes=figure(raw, "reserved_bytes", "current"),
                peak_allocated_bytes=figure(raw, "allocated_bytes", "peak"),
                peak_reserved_bytes=figure(raw, "reserved_bytes", "peak"),
            )
        )
        if self._reset_peaks:
            self._reset(self._place)

    def end(self) -> tuple[MemoryStats, ...]:
        """The step is over."""
        stats = tuple(
            reading if isinstance(reading, MemoryStats) else _memory_stats(*reading, self._figure)
            for reading in self._readings
        )
        return stats if self._reset_peaks else _only_new_peaks(stats)


def _nested_figure(raw: Mapping[str, Any], name: str, which: str) -> int | None:
    return raw[name]["all"][which] if name in raw else None


def _flat_figure(raw: Mapping[str, Any], name: str, which: str) -> int | None:
    return raw.get(f"{name}.all.{which}")


def _memory_stats(
    raw: Mapping[str, Any],
    held: Holdings | None,
    figure: Callable[[Mapping[str, Any], str, str], int | None],
) -> MemoryStats:
    return MemoryStats(
        allocated_bytes=figure(raw, "allocated_bytes", "current"),
        reserved_bytes=figure(raw, "reserved_bytes", "current"),
        active_bytes=figure(raw, "active_bytes", "current"),
        inactive_split_bytes=figure(raw, "inactive_split_bytes", "current"),
        requested_bytes=figure(raw, "requested_bytes", "current"),
        peak_allocated_bytes=figure(raw, "allocated_bytes", "peak"),
        peak_reserved_bytes=figure(raw, "reserved_bytes", "peak"),
        num_allocations=figure(raw, "allocation", "current"),
        num_alloc_retries=raw.get("num_alloc_retries"),
        num_ooms=raw.get("num_ooms"),
        by_category=held.by_category if held else None,
    )


def _only_new_peaks(stats: tuple[MemoryStats, ...]) -> tuple[MemoryStats, ...]:
    """Without resets a peak says something of the time since the last reading only if it has risen."""
    risen = list(stats[:1])
    for earlier, later in pairwise(stats):
        risen.append(
            replace(
                later,
                peak_allocated_bytes=later.peak_allocated_bytes
                if later.peak_allocated_bytes != earlier.peak_allocated_bytes
                else None,
                peak_reserved_bytes=later.peak_reserved_bytes
                if later.peak_reserved_bytes != earlier.peak_reserved_bytes
                else None,
            )
        )
    return tuple(risen)
