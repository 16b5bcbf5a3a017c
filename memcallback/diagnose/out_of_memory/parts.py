"""The parts of an out-of-memory report: a live tensor, the place, the device's memory, the peak."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.core.code_lines import CodeLine


@dataclass(frozen=True, kw_only=True)
class OomTensor:
    """A tensor that was live when memory ran out.

    Attributes:
        size_bytes: The size of its storage, in bytes.
        shape: Its shape.
        dtype: Its dtype, such as `float32`.
        owner: Who holds it, such as `gradient of fc.weight`; empty if unknown.
        module: The module it belongs to; the root is "", None is unknown.
        line: The line of the program that created it; None if unknown.
    """

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    owner: str
    module: str | None = None
    line: CodeLine | None = None


@dataclass(frozen=True, kw_only=True)
class OomLocation:
    """Where memory ran out.

    Attributes:
        phase: `forward pass`, `backward pass`, `optimizer step`, or another stage such as
            `validation`; empty if unknown.
        step: The number of the training step, from 1; None outside of one.
        operator: The autograd node that requested memory, or the expression in the program; empty
            if unknown.
        module: The fully qualified name of the running module, the root is ""; None if unknown.
        is_near: Whether `module` is only a neighbour of the operator in the backward pass.
        line: The innermost line of the program; None if unknown.
        forward_line: In the backward pass, the line of the same operator in the forward pass, from
            the trace; None if unknown.
    """

    phase: str = ""
    step: int | None = None
    operator: str = ""
    module: str | None = None
    is_near: bool = False
    line: CodeLine | None = None
    forward_line: CodeLine | None = None


@dataclass(frozen=True, kw_only=True)
class OomMemoryState:
    """The device's memory when it ran out, in bytes; None for unknown values.

    Attributes:
        requested_bytes: Requested from the device: the allocator's segment, not the tensor.
        capacity_bytes: The device's memory, or what this process may use of it.
        free_bytes: Free on the device.
        allocated_bytes: Allocated to tensors by the allocator.
        reserved_bytes: Reserved by the allocator.
        available_bytes: The most the allocator could reserve: reserved and free memory, up to its
            limit.
        non_pytorch_bytes: Used on the device outside this process's allocator.
        other_processes_bytes: The part of that used by other processes that the driver shows.
        resident_bytes: The resident set size of this process; CPU only.
    """

    requested_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    available_bytes: int | None = None
    non_pytorch_bytes: int | None = None
    other_processes_bytes: int | None = None
    resident_bytes: int | None = None

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved but unallocated."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    def rows(self) -> list[tuple[str, int]]:
        """The known values with their names."""
        named = (
            ("requested", self.requested_bytes),
            ("capacity", self.capacity_bytes),
            ("free", self.free_bytes),
            ("allocated", self.allocated_bytes),
            ("reserved", self.reserved_bytes),
            ("reserved but unallocated", self.unallocated_bytes),
            ("non-PyTorch", self.non_pytorch_bytes),
            ("  by other processes", self.other_processes_bytes),
            ("resident", self.resident_bytes),
        )
        return [(name, size_bytes) for name, size_bytes in named if size_bytes is not None]


@dataclass(frozen=True, kw_only=True)
class PredictedPeak:
    """The prediction for the step that failed, at its batch size, in bytes; None if unknown.

    Attributes:
        peak_allocated_bytes: Peak allocated memory.
        peak_reserved_bytes: Peak reserved memory.
        available_bytes: The most the allocator could reserve.
        fits: Whether the step was predicted to fit.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int | None = None
    available_bytes: int | None = None
    fits: bool | None = None

    @property
    def shortfall_bytes(self) -> int | None:
        """Bytes that the step's tensors need beyond those available; negative if they need less."""
        if self.available_bytes is None:
            return None
        return self.peak_allocated_bytes - self.available_bytes
