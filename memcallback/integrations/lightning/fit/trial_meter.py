"""Peak memory of a trial (better name: trial_meter.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from memcallback.core.step_memory import MemoryStats, PhaseMemory, StepMemory, largest
from memcallback.core.tensors import is_on, storage_bytes
from memcallback.core.types import Category, Kind, Phase
from memcallback.devices.meters import AllocatorMeter, CpuMeter, Meter
from memcallback.step.holdings import holdings

_HELD = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE)


class TrialMeter:
    """Reads the largest figure of a trial: of an accelerator's allocator all through it, on a CPU
    in its steps.

    A CPU's memory is that of the data too, which are no part of a step: there each training and
    validation step is read on its own.
    """

    def __init__(self, device: torch.device, module: torch.nn.Module) -> None:
        self._device, self._module = device, module
        self._is_by_step = device.type == "cpu"
        self._meter: Meter = CpuMeter() if self._is_by_step else AllocatorMeter(device)
        self._is_open = False
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._start()

    def _start(self) -> None:
        self._peak_allocated_bytes: int | None = None
        self._peak_reserved_bytes: int | None = None
        self.num_alloc_retries = 0
        self.num_ooms = 0

    @property
    def device_name(self) -> str:
        """The device's name."""
        return self._meter.device_name

    @property
    def counts(self) -> str:
        """Which memory must fit: `allocated` on a CPU, else `reserved`."""
        return "allocated" if self._is_by_step else "reserved"

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """A trial begins."""
        self._start()
        self._optimizers = optimizers
        if not self._is_by_step:
            self._open(None)

    def begin_step(self, batch: object) -> None:
        """A training or validation step begins."""
        if self._is_by_step:
            self._close()
            self._open(batch)

    def end_step(self, batch: object) -> None:
        """It has ended."""
        if self._is_by_step:
            self._close(batch)

    def end(self) -> None:
        """The trial has ended, by itself or by an error."""
        self._close()

    def step(self, batch_size: int) -> StepMemory | None:
        """The trial as one measured step; None if its peak could not be read."""
        if largest((self._peak_allocated_bytes, self._peak_reserved_bytes)) is None:
            return None
        window = PhaseMemory(
            phase=Phase.BACKWARD,
            covers=tuple(Phase),
            start=MemoryStats(),
            end=MemoryStats(),
            peak_allocated_bytes=self._peak_allocated_bytes,
            peak_reserved_bytes=self._peak_reserved_bytes,
        )
        return StepMemory(
            kind=Kind.MEASURED,
            source=self._meter.source,
            device_name=self.device_name,
            windows=(window,),
            batch_size=batch_size,
        )

    def held_bytes(self) -> int:
        """Parameters, buffers and optimizer state on the device, at this moment."""
        found = holdings([self._module], self._optimizers, None, self._device).by_category
        return sum(found.get(category, 0) for category in _HELD)

    def elsewhere_bytes(self) -> int:
        """Allocated on the device by this process and no part of the module:
        DistributedDataParallel's buckets, another model.
        """
        if self._is_by_step:
            return 0
        self._meter.begin()
        self._meter.read(None)
        (stats,) = self._meter.end()
        tensors: Iterable[torch.Tensor] = (*self._module.parameters(), *self._module.buffers())
        return max(
            0,
            (stats.allocated_bytes or 0)
            - storage_bytes(one for one in tensors if is_on(one.device, self._device)),
        )

    def forget_peaks(self) -> None:
        """The peaks of a trial that is over are not those of the training."""
        if not self._is_by_step:
            self._meter.begin()
            self._meter.read(None)

    def _open(self, batch: object) -> None:
        self._meter.begin()
        self._is_open = True
        self._read(batch)

    def _read(self, batch: object) -> None:
        # On a CPU what is held has to be known: its allocation events tell of changes alone.
        self._meter.read(
            holdings([self._module], self._optimizers, batch, self._device)
            if self._is_by_step
            else None
        )

    def _close(self, batch: object = None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._read(batch)
        first, *others = self._meter.end()
        self._peak_allocated_bytes = largest(
            (self._peak_allocated_bytes, *(one.peak_allocated_bytes for one in others))
        )
        self._peak_reserved_bytes = largest(
            (self._peak_reserved_bytes, *(one.peak_reserved_bytes for one in others))
        )
        self.num_alloc_retries += (others[-1].num_alloc_retries or 0) - (
            first.num_alloc_retries or 0
        )
        self.num_ooms += (others[-1].num_ooms or 0) - (first.num_ooms or 0)
