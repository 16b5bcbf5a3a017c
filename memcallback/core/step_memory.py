"""StepMemory and its parts: memory of a moment, a phase and a step, measured or predicted alike.

Tables, curves, errors and suggestions take these wherever they come from. An unknown value is None,
never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from memcallback.core.document import Document, Printable, Table
from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Kind, Phase, Stage
from memcallback.core.units import format_bytes

#: Columns of a table of phases.
PHASE_COLUMNS = ("allocated", "start", "end", "peak", "reserved peak")


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """Memory of this process at one moment, and its peaks since the previous reading, in bytes.

    Attributes:
        allocated_bytes: Held by live tensors, as the allocator counts them. On a CPU: bytes of live
            storages.
        reserved_bytes: Taken from the device by the allocator, allocated or not.
        active_bytes: Allocated, and freed but still in use by a stream.
        inactive_split_bytes: Free parts of segments that are partly in use, which cannot be
            returned to the device.
        requested_bytes: The requested sizes of allocations, before rounding.
        resident_bytes: The process's resident memory (CPU only).
        peak_allocated_bytes: The largest `allocated_bytes` since the previous reading.
        peak_reserved_bytes: The largest `reserved_bytes` since the previous reading.
        peak_resident_bytes: The largest `resident_bytes` since the previous reading.
        num_allocations: Live allocations.
        num_alloc_retries: How often the allocator has released its cache and tried again, since the
            program began.
        num_ooms: How often it has run out of memory, since the program began.
        by_category: Bytes of the storages of parameters, buffers, gradients, optimizer state and
            input. A shared storage counts once, in the first of these that holds it.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    requested_bytes: int | None = None
    resident_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_resident_bytes: int | None = None
    num_allocations: int | None = None
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    by_category: Mapping[Category, int] | None = None

    @property
    def rest_bytes(self) -> int | None:
        """Allocated memory that belongs to no category, at least 0.

        Activations, temporaries, workspaces and rounding: not held by model, optimizer or batch.
        """
        if self.allocated_bytes is None or self.by_category is None:
            return None
        return max(
            0, self.allocated_bytes - sum(self.by_category.get(c, 0) for c in PERSISTENT_CATEGORIES)
        )


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The memory of one phase of a step, from its start to its end.

    Attributes:
        phase: The phase.
        covers: The phases in this record, in order. More than one if nothing marks where one
            ends and the next starts (a bare `loss.backward()` under Lightning's manual
            optimization; LBFGS calling its closure again).
        start: The reading at the beginning.
        end: The reading at the end.
        peak_allocated_bytes: The largest allocated memory inside.
        peak_reserved_bytes: The largest reserved memory inside.
        peak_resident_bytes: The largest resident size of the process inside (CPU only).
        num_alloc_retries: Retries inside.
        num_ooms: Out-of-memory errors inside.
        low_bytes: The lower bound of a prediction with two bounds; `peak_allocated_bytes` is the
            upper one.
    """

    phase: Phase
    covers: tuple[Phase, ...]
    start: MemoryStats
    end: MemoryStats
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_resident_bytes: int | None = None
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    low_bytes: int | None = None

    def __post_init__(self) -> None:
        assert self.phase in self.covers, (self.phase, self.covers)

    @property
    def label(self) -> str:
        """The phase, or the phases, in words, such as `forward + backward`."""
        return " + ".join(phase.label for phase in self.covers)

    def row(self, label: str) -> tuple[str, ...]:
        """A row of a table: label, allocated at start and end, its peak, reserved peak."""
        sizes = (
            self.start.allocated_bytes,
            self.end.allocated_bytes,
            self.peak_allocated_bytes,
            self.peak_reserved_bytes,
        )
        return (label, *("" if size is None else format_bytes(size) for size in sizes))


@dataclass(frozen=True, kw_only=True)
class StepMemory(Printable):
    """The memory of one step: one call of the loop's body with one batch.

    Attributes:
        kind: Measured or predicted.
        source: Where the values come from, such as `CUDA caching allocator` or `textbook estimate`.
        device_name: Such as `NVIDIA A100-SXM4-80GB` or `CPU`.
        windows: The phases in the order in which they ran; a phase may occur more than once (two
            optimizers, LBFGS).
        index: The number of the step in the recording, from 0; None for a prediction.
        batch_size: Samples in the batch; None if it could not be inferred.
        is_warm_up: No optimizer update came before it, so gradients and optimizer state did not
            exist yet.
        num_optimizer_updates: Updates inside; 0 with an optimizer phase means a skipped step
            (GradScaler after an overflow); None if unknown.
        is_interrupted: An exception ended it.
        stage: The kind of run that it is a step of, such as a training.
    """

    kind: Kind
    source: str
    device_name: str
    windows: tuple[PhaseMemory, ...]
    index: int | None = None
    batch_size: int | None = None
    is_warm_up: bool = False
    num_optimizer_updates: int | None = None
    is_interrupted: bool = False
    stage: Stage = Stage.TRAINING

    def to_table(self) -> Table:
        """One row for each phase in order; with reserved memory if it is known."""
        kind = "warm-up, " if self.is_warm_up else ""
        size = "unknown" if self.batch_size is None else f"{self.batch_size:,}"
        columns = PHASE_COLUMNS if self.peak_reserved_bytes is not None else PHASE_COLUMNS[:-1]
        return Table(
            title=f"Memory of one {self.stage.label} ({kind}batch size {size}) on "
            f"{self.device_name}\n{self.kind.value} by {self.source}",
            columns=columns,
            rows=tuple(window.row(window.label)[: len(columns)] for window in self.windows),
        )

    def document(self) -> Document:
        """The table alone."""
        return Document(self.to_table())

    @cached_property
    def phases(self) -> Mapping[Phase, PhaseMemory]:
        """Each phase once; if it ran several times: first start, last end and largest peak."""
        merged: dict[Phase, PhaseMemory] = {}
        for window in self.windows:
            earlier = merged.get(window.phase)
            merged[window.phase] = merge(earlier, window) if earlier else window
        return dict(sorted(merged.items(), key=lambda item: list(Phase).index(item[0])))

    @cached_property
    def peak_allocated_bytes(self) -> int | None:
        """The largest allocated memory of the step."""
        return largest(window.peak_allocated_bytes for window in self.windows)

    @cached_property
    def peak_reserved_bytes(self) -> int | None:
        """The largest reserved memory of the step."""
        return largest(window.peak_reserved_bytes for window in self.windows)

    @cached_property
    def peak_resident_bytes(self) -> int | None:
        """The largest resident size of the process in the step (CPU only)."""
        return largest(window.peak_resident_bytes for window in self.windows)

    @cached_property
    def num_alloc_retries(self) -> int | None:
        """Retries of the allocator inside the step."""
        return total(window.num_alloc_retries for window in self.windows)

    @cached_property
    def num_ooms(self) -> int | None:
        """Out-of-memory errors inside the step."""
        return total(window.num_ooms for window in self.windows)

    @cached_property
    def held_bytes(self) -> int | None:
        """The most held by parameters, buffers, gradients and optimizer state; None if not counted.

        It is their sum at the boundary where it is largest.
        """
        return max(self._held_at_boundaries, default=None)

    @cached_property
    def always_held_bytes(self) -> int | None:
        """What parameters, buffers, gradients and optimizer state hold throughout the step.

        It is their sum at the boundary where it is smallest; None if not counted.
        """
        return min(self._held_at_boundaries, default=None)

    @cached_property
    def _held_at_boundaries(self) -> list[int]:
        fixed = [category for category in PERSISTENT_CATEGORIES if category is not Category.INPUT]
        splits = [
            stats.by_category
            for window in self.windows
            for stats in (window.start, window.end)
            if stats.by_category
        ]
        return [sum(split.get(category, 0) for category in fixed) for split in splits]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """A whole device, as seen by its driver (NVML) or the operating system.

    Sizes are in bytes; unknown values are None.

    Attributes:
        capacity_bytes: All memory of the device.
        used_bytes: Used by all processes.
        this_process_bytes: Used by this process: its context, its allocator's reserved memory, and
            all else.
        other_processes_bytes: Used by the other processes that the driver shows.
        reserved_bytes: Reserved by this process's allocator at the same moment (accelerators).
        utilisation_pct: The share of the last sampling period with a running kernel, 0 to 100
            (NVML).
        temperature_celsius: The temperature of the chip (NVML).
        power_watts: The power drawn (NVML).
        unavailable: Why a memory value is missing, in words; None if none is.
    """

    capacity_bytes: int | None = None
    used_bytes: int | None = None
    this_process_bytes: int | None = None
    other_processes_bytes: int | None = None
    reserved_bytes: int | None = None
    utilisation_pct: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    unavailable: str | None = None

    @property
    def non_pytorch_bytes(self) -> int | None:
        """Used, but not reserved by this process's allocator; at least 0.

        Contexts, other allocators and other processes.
        """
        if self.used_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.used_bytes - self.reserved_bytes)


def measured_window(
    phase: Phase, covers: tuple[Phase, ...], readings: Sequence[MemoryStats]
) -> PhaseMemory:
    """Build a window from the readings at its start, inside it and at its end, in order.

    A reading's peaks are those since the reading before, so the first one's are not the window's.
    """
    start, *inside = readings
    return PhaseMemory(
        phase=phase,
        covers=covers,
        start=start,
        end=readings[-1],
        peak_allocated_bytes=largest(stats.peak_allocated_bytes for stats in inside),
        peak_reserved_bytes=largest(stats.peak_reserved_bytes for stats in inside),
        peak_resident_bytes=largest(stats.peak_resident_bytes for stats in inside),
        num_alloc_retries=_increase(start.num_alloc_retries, readings[-1].num_alloc_retries),
        num_ooms=_increase(start.num_ooms, readings[-1].num_ooms),
    )


def _increase(start: int | None, end: int | None) -> int | None:
    return None if start is None or end is None else end - start


def merge(first: PhaseMemory, second: PhaseMemory) -> PhaseMemory:
    """Merge two windows of a phase, from the start of the first to the end of the second."""
    assert first.phase is second.phase, (first.phase, second.phase)
    return PhaseMemory(
        phase=first.phase,
        covers=tuple(phase for phase in Phase if phase in first.covers + second.covers),
        start=first.start,
        end=second.end,
        peak_allocated_bytes=largest((first.peak_allocated_bytes, second.peak_allocated_bytes)),
        peak_reserved_bytes=largest((first.peak_reserved_bytes, second.peak_reserved_bytes)),
        peak_resident_bytes=largest((first.peak_resident_bytes, second.peak_resident_bytes)),
        num_alloc_retries=total((first.num_alloc_retries, second.num_alloc_retries)),
        num_ooms=total((first.num_ooms, second.num_ooms)),
        low_bytes=largest((first.low_bytes, second.low_bytes)),
    )


def larger(
    first: StepMemory | None, second: StepMemory, *, in_all_phases: bool = False
) -> StepMemory:
    """Choose a steady step over a warm-up, then one with an optimizer step, then the larger peak.

    If all are equal, the second. With `in_all_phases` the sum of the phases' peaks counts: of two
    steps with about the same peak, one can have no gradients in its forward pass (Lightning clears
    them before validation).
    """

    def rank(step: StepMemory) -> tuple[bool, bool, bool, int]:
        # The resident size includes the rest of the process; it counts only where allocated memory
        # was not read.
        peak = (
            step.peak_resident_bytes
            if step.peak_allocated_bytes is None
            else step.peak_allocated_bytes
        )
        if in_all_phases and step.peak_allocated_bytes is not None:
            peak = sum(window.peak_allocated_bytes or 0 for window in step.phases.values())
        return (
            not step.is_warm_up,
            Phase.OPTIMIZER_STEP in step.phases,
            step.peak_allocated_bytes is not None,
            peak or 0,
        )

    return second if first is None or rank(second) >= rank(first) else first


def largest(values: Iterable[int | None]) -> int | None:
    """The largest known value; None if none is known."""
    return max((value for value in values if value is not None), default=None)


def total(values: Iterable[int | None]) -> int | None:
    """The sum of the values; None if there are none or one is unknown."""
    known = list(values)
    if not known or None in known:
        return None
    return sum(value for value in known if value is not None)


def error_pct(predicted_bytes: int | None, measured_bytes: int | None) -> float | None:
    """The error of a prediction in percent of the measured value; positive if it is too high."""
    if predicted_bytes is None or not measured_bytes:
        return None
    return 100.0 * (predicted_bytes - measured_bytes) / measured_bytes


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """The storages of a model, its optimizers and its batch at one moment.

    Attributes:
        by_category: Bytes of storages for each of parameter, buffer, gradient, optimizer state and
            input; a storage in several categories counts in the first of them.
        storages: Address of each storage on the device -> its bytes; storages without data have no
            address.
    """

    by_category: Mapping[Category, int]
    storages: Mapping[int, int]
