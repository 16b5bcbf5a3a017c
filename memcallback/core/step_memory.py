"""StepMemory and its parts: the memory of one step, measured or predicted. Also the Holdings
record.

Everything downstream (tables, curves, errors, advice) takes these and does not ask where they come
from. A figure that is not known is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from memcallback.core.document import Document, Printable, Table
from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Kind, Phase
from memcallback.core.units import format_bytes

#: Of a table of phases: what stands at both ends, and the peaks.
PHASE_COLUMNS = ("allocated", "start", "end", "peak", "reserved peak")


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """One reading at one moment. All sizes in bytes.

    Attributes:
        allocated_bytes: Held by live tensors, as the allocator accounts for them. On a CPU: bytes
            alive in storages.
        reserved_bytes: Taken from the device by the allocator, allocated or not.
        active_bytes: Allocated, and freed but still in use by a stream.
        inactive_split_bytes: Free parts of segments that are partly in use, which cannot be given
            back.
        requested_bytes: What was asked for, before rounding.
        resident_bytes: The process's resident memory (CPU only).
        peak_allocated_bytes: The largest `allocated_bytes` since the previous reading.
        peak_reserved_bytes: The largest `reserved_bytes` since the previous reading.
        peak_resident_bytes: The largest `resident_bytes` since the previous reading.
        num_allocations: Of those that are live.
        num_alloc_retries: How often the allocator has had to release its cache and try again, since
            the program began.
        num_ooms: How often it has given up, since the program began.
        by_category: Bytes of storages held for each of `PERSISTENT_CATEGORIES`; shared storages
            count once, in the first of the categories that holds them.
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
        """Allocated but not held by model, optimizer or batch: activations, temporaries,
        workspaces, rounding; at least 0.
        """
        if self.allocated_bytes is None or self.by_category is None:
            return None
        return max(
            0, self.allocated_bytes - sum(self.by_category.get(c, 0) for c in PERSISTENT_CATEGORIES)
        )


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """One phase of a step, from a first moment to a last one.

    Attributes:
        phase: The phase.
        covers: The phases inside this window, in order. More than one where nothing marks the
            boundary between them (a bare `loss.backward()` under Lightning's manual optimization;
            LBFGS calling its closure again).
        start: The reading at the beginning.
        end: The reading at the end.
        peak_allocated_bytes: The largest allocated figure inside.
        peak_reserved_bytes: The largest reserved figure inside.
        peak_resident_bytes: The largest resident size of the process inside (CPU only).
        num_alloc_retries: Retries inside.
        num_ooms: Out-of-memory errors inside.
        low_bytes: For a prediction with a band: its lower edge. `peak_allocated_bytes` is the upper
            one.
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
        """The name of the window, such as `forward + backward`."""
        return " + ".join(phase.label for phase in self.covers)

    def row(self, label: str) -> tuple[str, ...]:
        """What stands in `PHASE_COLUMNS` for it; nothing for what is not known."""
        figures = (
            self.start.allocated_bytes,
            self.end.allocated_bytes,
            self.peak_allocated_bytes,
            self.peak_reserved_bytes,
        )
        return (label, *("" if figure is None else format_bytes(figure) for figure in figures))


@dataclass(frozen=True, kw_only=True)
class StepMemory(Printable):
    """The memory of one training step: one call of the loop's body with one batch.

    Attributes:
        kind: Measured or predicted.
        source: What gave the figures, such as `CUDA caching allocator` or `textbook law`.
        device_name: Such as `NVIDIA A100-SXM4-80GB` or `CPU`.
        windows: The phases in the order in which they ran; a phase may come more than once (two
            optimizers, LBFGS).
        index: Which step of the recording, from 0; None for a prediction.
        batch_size: Samples in the batch; None if it could not be inferred.
        is_warm_up: No optimizer update came before it, so gradients and optimizer state were not
            there yet.
        num_optimizer_updates: Updates made inside; 0 with an optimizer phase means a skipped step
            (GradScaler after an overflow); None if it cannot be known.
        is_interrupted: An exception ended it.
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

    def to_table(self) -> Table:
        """One row for each phase in the order in which they ran; reserved memory where there is
        any.
        """
        kind = "warm-up, " if self.is_warm_up else ""
        size = "unknown" if self.batch_size is None else self.batch_size
        columns = PHASE_COLUMNS if self.peak_reserved_bytes is not None else PHASE_COLUMNS[:-1]
        return Table(
            title=f"Memory of one training step ({kind}batch size {size}) on {self.device_name}\n{self.kind.value} by {self.source}",
            columns=columns,
            rows=tuple(window.row(window.label)[: len(columns)] for window in self.windows),
        )

    def document(self) -> Document:
        """The table alone."""
        return Document(self.to_table())

    @cached_property
    def phases(self) -> Mapping[Phase, PhaseMemory]:
        """One entry for each phase that ran, windows of the same phase merged: first start, last
        end, largest peak.
        """
        merged: dict[Phase, PhaseMemory] = {}
        for window in self.windows:
            earlier = merged.get(window.phase)
            merged[window.phase] = merge(earlier, window) if earlier else window
        return dict(sorted(merged.items(), key=lambda item: list(Phase).index(item[0])))

    @cached_property
    def peak_allocated_bytes(self) -> int | None:
        """The largest allocated figure of the step."""
        return largest(window.peak_allocated_bytes for window in self.windows)

    @cached_property
    def peak_reserved_bytes(self) -> int | None:
        """The largest reserved figure of the step."""
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
        """Parameters, buffers, gradients and optimizer state at the boundary at which they are
        largest together; None if not counted.
        """
        return max(self._held_at_boundaries, default=None)

    @cached_property
    def always_held_bytes(self) -> int | None:
        """The same at the boundary at which they are smallest: what stands throughout the step,
        which gradients seldom do.
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
    """A whole device, as its driver (NVML) or the operating system sees it. All sizes in bytes;
    what is unknown is None.

    Attributes:
        capacity_bytes: All the memory there is.
        used_bytes: Used by anybody.
        this_process_bytes: Used by this process: its context, its allocator's reserved memory, and
            the rest of it.
        other_processes_bytes: Used by the other processes that the driver shows.
        reserved_bytes: Reserved by this process's allocator at the same moment (accelerators).
        utilisation_pct: The share of the last moments in which a kernel ran, 0 to 100 (NVML).
        temperature_celsius: The temperature of the chip (NVML).
        power_watts: What it draws (NVML).
        unavailable: Why a figure of memory is missing, in words; None if nothing is.
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
        """What is used but not reserved by this process's allocator: contexts, other allocators,
        other processes; at least 0.
        """
        if self.used_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.used_bytes - self.reserved_bytes)


def measured_window(
    phase: Phase, covers: tuple[Phase, ...], readings: Sequence[MemoryStats]
) -> PhaseMemory:
    """A window from the readings at its boundaries and inside it, in order: at least the one at
    which it starts and the one at which it ends.

    The peaks of each reading are those since the one before, so those of the first are not the
    window's.
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
    """Two windows of one phase as one, from the start of the first to the end of the second."""
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
    """Of two steps a steady one before a warm-up, one with an optimizer step before one without,
    then the larger peak, then the later.

    With `in_all_phases` it is the sum of the phases' peaks that counts: of two steps with about the
    same peak, one can be without gradients in its forward pass (Lightning clears them before
    validation).
    """

    def rank(step: StepMemory) -> tuple[bool, bool, bool, int]:
        # The resident size has the rest of the process in it, and decides only where allocated
        # memory was not read.
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


def largest(figures: Iterable[int | None]) -> int | None:
    """The largest of the known figures; None if none is known."""
    return max((figure for figure in figures if figure is not None), default=None)


def total(figures: Iterable[int | None]) -> int | None:
    """The sum of the figures; None if there is none, or one is unknown."""
    known = list(figures)
    return (
        None
        if not known or None in known
        else sum(figure for figure in known if figure is not None)
    )


def error_pct(predicted_bytes: int | None, measured_bytes: int | None) -> float | None:
    """How far a prediction is off, in percent of the measured figure: positive where it is too
    high; None if either is unknown.
    """
    if predicted_bytes is None or not measured_bytes:
        return None
    return 100.0 * (predicted_bytes - measured_bytes) / measured_bytes


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What is held at one moment.

    Attributes:
        by_category: Bytes of storages for each of parameter, buffer, gradient, optimizer state and
            input; a storage that serves several counts in the first of them.
        storages: Address of each storage on the device -> its bytes; those without data have none.
    """

    by_category: Mapping[Category, int]
    storages: Mapping[int, int]
