"""The recorded steps and the report on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from memcallback.batch_size.bounds import DEFAULT_BOUNDS, BatchSizeBounds
from memcallback.batch_size.estimate import suggest
from memcallback.core.module_table import ModuleTable
from memcallback.core.step_memory import DeviceMemory, MemoryStats, StepMemory, larger, largest
from memcallback.core.types import Phase
from memcallback.core.units import format_bytes
from memcallback.core.validation import DEFAULT_HEADROOM
from memcallback.devices.memory import device_memory, usable_bytes
from memcallback.prediction.prediction import StepPrediction
from memcallback.record.typical import TypicalStep
from memcallback.report.report import Report, Setup

_NUM_STEPS = 100
_PEAKS = ("allocated_bytes", "reserved_bytes", "resident_bytes")


class Recording:
    """The steps that a `MemoryRecorder` has recorded; it documents the attributes."""

    def __init__(self) -> None:
        self._steps: deque[StepMemory] = deque(maxlen=_NUM_STEPS)
        self.warm_up: StepMemory | None = None
        self.steady: StepMemory | None = None
        self.largest: StepMemory | None = None
        self._typical = TypicalStep()
        #: Before the first step and after the last one, since the program began.
        self._retries: tuple[int, int] | None = None
        #: By name, such as `allocated_bytes`; None before the first step.
        self.lifetime_peaks: dict[str, int | None] = dict.fromkeys(_PEAKS)
        self._compute_modules: Callable[[], ModuleTable] | None = None
        self._modules: ModuleTable | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the table by module, in place of the readings that it is computed from."""
        return vars(self) | {
            "_steps": self._steps.copy(),
            "lifetime_peaks": dict(self.lifetime_peaks),
            "_typical": copy(self._typical),
            "_modules": self.modules,
            "_compute_modules": None,
        }

    @property
    def steps(self) -> tuple[StepMemory, ...]:
        """The last 100 recorded steps, oldest first."""
        return tuple(self._steps)

    @property
    def modules(self) -> ModuleTable | None:
        """As `MemoryRecorder.modules`; computed when first asked for."""
        if self._modules is None and self._compute_modules is not None:
            self._modules = self._compute_modules()
        return self._modules

    @property
    def typical(self) -> StepMemory | None:
        """As `MemoryRecorder.typical`."""
        return self._typical.step

    @property
    def num_alloc_retries(self) -> int | None:
        """As `MemoryRecorder.num_alloc_retries`."""
        return None if self._retries is None else self._retries[1] - self._retries[0]

    def add(
        self,
        record: StepMemory,
        stats: Sequence[MemoryStats],
        compute_modules: Callable[[], ModuleTable] | None,
        *,
        is_usual: bool = True,
    ) -> None:
        """Add a step, with all its readings and what computes its table by module.

        `is_usual` says whether it could be a typical one.
        """
        for name, peak in self.lifetime_peaks.items():
            self.lifetime_peaks[name] = largest(
                (peak, *(getattr(reading, f"peak_{name}") for reading in stats))
            )
        counts = [reading.num_alloc_retries for reading in stats]
        known = [count for count in counts if count is not None]
        if known:
            self._retries = (self._retries[0] if self._retries else known[0], known[-1])
        self._steps.append(record)
        if record.is_warm_up:
            self.warm_up = record
        elif not record.is_interrupted:
            self.largest = larger(self.largest, record)
            if record.held_bytes is not None:
                self.steady = larger(self.steady, record, in_all_phases=True)
            if is_usual:
                self._typical.add(record)
            if compute_modules is not None and (
                self._compute_modules is None or Phase.OPTIMIZER_STEP in record.phases
            ):
                self._compute_modules, self._modules = compute_modules, None

    def peaks_to_dict(self) -> dict[str, int | None]:
        """The lifetime peaks for a checkpoint."""
        return {f"lifetime_peak_{name}": peak for name, peak in self.lifetime_peaks.items()}

    def load_peaks(self, state: Mapping[str, int | None]) -> None:
        """Continue from the lifetime peaks of a checkpoint."""
        self.lifetime_peaks = {name: state.get(f"lifetime_peak_{name}") for name in _PEAKS}

    def report(
        self,
        torch_device: torch.device,
        prediction: StepPrediction | None = None,
        *,
        device: DeviceMemory | None = None,
        capacity_bytes: int | None = None,
        headroom: float = DEFAULT_HEADROOM,
        bounds: BatchSizeBounds = DEFAULT_BOUNDS,
        notes: tuple[str, ...] = (),
    ) -> Report:
        """As `MemoryRecorder.report`, of steps on a device."""
        device = device_memory(torch_device) if device is None else device
        step = self.typical or self.steady or self.warm_up
        if prediction and step and step.batch_size:
            try:
                prediction = prediction.at(step.batch_size)
            except ValueError as error:
                reason = str(error).rstrip(".")
                notes = (*notes, f"No prediction for batch size {step.batch_size:,}: {reason}.")
                prediction = None
        outside_bytes = self._outside_bytes(device) if capacity_bytes is None else None
        advice = suggest(
            measured=self.largest,
            predicted=prediction,
            always_held_bytes=self.steady.always_held_bytes if self.steady else None,
            capacity_bytes=usable_bytes(torch_device, device.capacity_bytes, outside_bytes or 0)
            if capacity_bytes is None
            else capacity_bytes,
            outside_bytes=outside_bytes,
            headroom=headroom,
            bounds=bounds.beside(step.batch_size if step else None),
        )
        setup = Setup()
        if capacity_bytes is not None:
            setup = Setup(target=f"a device of {format_bytes(capacity_bytes)}")
            device = DeviceMemory(capacity_bytes=capacity_bytes, unavailable=device.unavailable)
        return Report(
            measured=step,
            prediction=prediction,
            device=device,
            advice=advice,
            lifetime_peak_allocated_bytes=self.lifetime_peaks["allocated_bytes"],
            notes=notes,
            setup=setup,
        )

    def _outside_bytes(self, device: DeviceMemory) -> int | None:
        """Memory used on the device, but not by the tensors of this training."""
        if device.reserved_bytes is not None:
            return device.non_pytorch_bytes
        peak_bytes = self.largest.peak_allocated_bytes if self.largest else None
        if peak_bytes is None or device.used_bytes is None:
            return device.other_processes_bytes
        return max(0, device.used_bytes - peak_bytes)
