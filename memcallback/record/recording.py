"""The recorded steps and the report on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memcallback.batch_size.advice import DEFAULT_HEADROOM
from memcallback.batch_size.estimate import suggest
from memcallback.core.module_table import ModuleTable
from memcallback.core.step_memory import DeviceMemory, MemoryStats, StepMemory, larger, largest
from memcallback.core.types import Phase
from memcallback.devices.memory import device_memory, usable_bytes
from memcallback.devices.meters import Meter
from memcallback.prediction.prediction import StepPrediction
from memcallback.report.report import Report


class Recording:
    """What a recorder has recorded; its attributes are those of `MemoryRecorder`.

    Args:
        meter: What the steps are read with.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._steps: deque[StepMemory] = deque(maxlen=100)
        self.warm_up: StepMemory | None = None
        self.steady: StepMemory | None = None
        self.largest: StepMemory | None = None
        self.lifetime_peak_allocated_bytes: int | None = None
        self.lifetime_peak_reserved_bytes: int | None = None
        self.lifetime_peak_resident_bytes: int | None = None
        self._modules_recorded: Callable[[], ModuleTable] | None = None
        self._module_table: ModuleTable | None = None

    @property
    def steps(self) -> tuple[StepMemory, ...]:
        """The last 100 recorded steps, oldest first."""
        return tuple(self._steps)

    @property
    def modules(self) -> ModuleTable | None:
        """With `per_module` the last sampled steady step by module, if possible one with an
        optimizer step; None if there was none.
        """
        if self._module_table is None and self._modules_recorded is not None:
            self._module_table = self._modules_recorded()
        return self._module_table

    def _keep(
        self,
        record: StepMemory,
        stats: tuple[MemoryStats, ...],
        modules: Callable[[], ModuleTable] | None,
    ) -> None:
        """Take in a step."""
        self.lifetime_peak_allocated_bytes = largest(
            (self.lifetime_peak_allocated_bytes, *(s.peak_allocated_bytes for s in stats))
        )
        self.lifetime_peak_reserved_bytes = largest(
            (self.lifetime_peak_reserved_bytes, *(s.peak_reserved_bytes for s in stats))
        )
        self.lifetime_peak_resident_bytes = largest(
            (self.lifetime_peak_resident_bytes, *(s.peak_resident_bytes for s in stats))
        )
        self._steps.append(record)
        if record.is_warm_up:
            self.warm_up = record
        elif not record.is_interrupted:
            self.largest = larger(self.largest, record)
            if record.held_bytes is not None:
                self.steady = larger(self.steady, record, in_all_phases=True)
            if modules is not None and (
                self._modules_recorded is None or Phase.OPTIMIZER_STEP in record.phases
            ):
                self._modules_recorded, self._module_table = modules, None

    def report(
        self,
        prediction: StepPrediction | None = None,
        *,
        device: DeviceMemory | None = None,
        capacity_bytes: int | None = None,
        headroom: float = DEFAULT_HEADROOM,
        notes: tuple[str, ...] = (),
    ) -> Report:
        """What was recorded so far beside a prediction, with the largest batch size that fits. Asks
        the device's driver: not for every step.

        Args:
            prediction: The prediction, at any batch size.
            device: The whole device, if it has just been asked for.
            capacity_bytes: The memory to plan for, by default that of the device that trains.
            headroom: The fraction of the capacity that the suggestion leaves free, at least 0 and
                below 1.
            notes: What else the person should know, one sentence each.

        Raises:
            ValueError: If `headroom` is out of range.
        """
        device = device_memory(self.meter.device) if device is None else device
        step = self.steady or self.warm_up
        if prediction and step and step.batch_size:
            try:
                prediction = prediction.at(step.batch_size)
            except ValueError as error:
                notes = (
                    *notes,
                    f"Nothing is predicted for batch size {step.batch_size}: {str(error).rstrip('.')}.",
                )
                prediction = None
        advice = suggest(
            measured=self.largest,
            predicted=prediction,
            always_held_bytes=self.steady.always_held_bytes if self.steady else None,
            capacity_bytes=self._plannable_bytes(device)
            if capacity_bytes is None
            else capacity_bytes,
            outside_bytes=self._outside_bytes(device) if capacity_bytes is None else None,
            headroom=headroom,
        )
        if capacity_bytes is not None:
            device = DeviceMemory(capacity_bytes=capacity_bytes, unavailable=device.unavailable)
        return Report(
            measured=step,
            prediction=prediction,
            device=device,
            advice=advice,
            lifetime_peak_allocated_bytes=self.lifetime_peak_allocated_bytes,
            notes=notes,
        )

    def _plannable_bytes(self, device: DeviceMemory) -> int | None:
        return usable_bytes(
            self.meter.device, device.capacity_bytes, self._outside_bytes(device) or 0
        )

    def _outside_bytes(self, device: DeviceMemory) -> int | None:
        """Used on the device, but not by this training's tensors."""
        if device.reserved_bytes is not None:
            return device.non_pytorch_bytes
        if (
            self.largest is None
            or self.largest.peak_allocated_bytes is None
            or device.used_bytes is None
        ):
            return None
        return max(0, device.used_bytes - self.largest.peak_allocated_bytes)
