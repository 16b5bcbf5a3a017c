"""Reading the allocator of a device, at the boundaries of a training step.

A meter is told when a step begins, where its boundaries are and when it ends, and then gives one `MemoryStats` for
each boundary. Reading is kept apart from making sense of what was read, so that a boundary costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch

from memcallback.cpu_meter import cpu_memory
from memcallback.holdings import Holdings
from memcallback.nvml import cuda_memory
from memcallback.stats import DeviceMemory, MemoryStats


class Meter(Protocol):
    """What a recorder needs of a device.

    Attributes:
        source: What gives the figures, such as `CUDA caching allocator`.
        device: The device that is read.
        device_name: Its name.
        reads_every_step: Whether a step costs so little that every one is read; else only sampled ones are.
    """

    source: str
    device: torch.device
    device_name: str
    reads_every_step: bool

    def begin(self) -> None:
        """A step begins."""

    def read(self, held: Holdings | None) -> None:
        """A boundary: note the figures of this moment and the peaks since the previous boundary.

        Args:
            held: What the training holds at this moment, on steps where that was counted.
        """

    def mark(self) -> None:
        """A moment between two boundaries: note what is allocated and its peak since the reading before, at the least cost."""

    def end(self) -> tuple[MemoryStats, ...]:
        """The step is over: one entry for each `read` and `mark` since `begin`."""


class MeterUnavailableError(RuntimeError):
    """This device cannot be read; the text says why and what to do."""


class AllocatorMeter:
    """PyTorch's caching allocator on CUDA, or any other accelerator that torch.accelerator can ask.

    A boundary is one read of the allocator's counters, which are bookkeeping of the host: no kernel is waited for.

    Args:
        device: An accelerator's device.
        reset_peaks: Reset the allocator's peaks at each boundary, so that each phase has a peak of its own. The reset is
            global to the process: `torch.cuda.max_memory_allocated()` then starts anew at each phase (the recorder
            publishes the peak over its whole life instead). With False nothing is reset, and a phase's peak is known
            only when it is the largest so far.

    Raises:
        MeterUnavailableError: If this build of PyTorch cannot read such a device.
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
            self._read: Callable[[torch.device | int], Mapping[str, Any]] = torch.cuda.memory_stats_as_nested_dict
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
        stats = tuple(reading if isinstance(reading, MemoryStats) else _memory_stats(*reading, self._figure) for reading in self._readings)
        return stats if self._reset_peaks else _only_new_peaks(stats)


def _nested_figure(raw: Mapping[str, Any], name: str, which: str) -> int | None:
    return raw[name]["all"][which] if name in raw else None


def _flat_figure(raw: Mapping[str, Any], name: str, which: str) -> int | None:
    return raw.get(f"{name}.all.{which}")


def _memory_stats(
    raw: Mapping[str, Any], held: Holdings | None, figure: Callable[[Mapping[str, Any], str, str], int | None]
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
                peak_allocated_bytes=later.peak_allocated_bytes if later.peak_allocated_bytes != earlier.peak_allocated_bytes else None,
                peak_reserved_bytes=later.peak_reserved_bytes if later.peak_reserved_bytes != earlier.peak_reserved_bytes else None,
            )
        )
    return tuple(risen)


def device_memory(device: torch.device, *, reserved_bytes: int | None = None) -> DeviceMemory:
    """A whole device, as its driver or the operating system sees it; for logging steps, not for every step.

    Args:
        device: Any device.
        reserved_bytes: What the allocator has reserved at this moment, where it has just been read.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) if reserved_bytes is None else reserved_bytes
        return replace(cuda_memory(device), reserved_bytes=reserved)
    if device.type == "cpu":
        return cpu_memory()
    return DeviceMemory(unavailable=f"nothing is known of a device of type {device.type!r} but its allocator")


def limit_bytes(device: torch.device) -> int | None:
    """What the allocator may reserve, where the program has bounded it (`torch.cuda.set_per_process_memory_fraction`); None where it has not."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if device.type != "cuda" or read is None or not torch.cuda.is_initialized():
        return None  # a bound opens the device
    index = torch.cuda.current_device() if device.index is None else device.index
    fraction = read(index)
    return int(fraction * torch.cuda.get_device_properties(index).total_memory) if fraction < 1 else None


def plannable_bytes(device: torch.device, capacity_bytes: int | None, outside_bytes: int) -> int | None:
    """The memory to plan for: that of the device; where the program has bounded its allocator, that bound and what is used outside of it.

    Args:
        device: The device.
        capacity_bytes: All its memory; None if unknown.
        outside_bytes: What of it is used, but not by this process's allocator.
    """
    bound = limit_bytes(device)
    return capacity_bytes if bound is None or capacity_bytes is None else min(capacity_bytes, bound + outside_bytes)


def default_device(modules: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the first parameter that has one; without parameters the current accelerator, else the CPU."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.device.type != "meta":
                return parameter.device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if accelerator else torch.device("cpu")
