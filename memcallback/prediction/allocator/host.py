"""CPU memory: no rounding, no caching."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memcallback.core.step_memory import MemoryStats
from memcallback.prediction.allocator.caching import OutOfMemoryError


@dataclass(frozen=True, slots=True)
class HostBlock:
    """What was handed out.

    Attributes:
        size_bytes: What was asked for.
    """

    size_bytes: int


class HostAllocator:
    """Counts what is alive.

    Attributes:
        allocated_bytes: In blocks handed out.
        peak_allocated_bytes: The most of it since the allocator was made or `reset_peaks` was
            called.
        num_alloc_retries: 0: there is no cache to give back.
    """

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        """Make an allocator that has nothing yet."""
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.num_alloc_retries = 0
        self._capacity_bytes = capacity_bytes

    def allocate(self, size_bytes: int, stream: int = 0) -> HostBlock:
        """Hand out a block."""
        if (
            self._capacity_bytes is not None
            and self.allocated_bytes + size_bytes > self._capacity_bytes
        ):
            stats = replace(self.stats(), reserved_bytes=self.allocated_bytes)
            raise OutOfMemoryError(size_bytes, size_bytes, stats, self._capacity_bytes)
        self.allocated_bytes += size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return HostBlock(size_bytes)

    def free(self, block: HostBlock) -> None:
        """Take a block back."""
        self.allocated_bytes -= block.size_bytes

    def stats(self) -> MemoryStats:
        """The figures now, with the peak since the allocator was made or `reset_peaks` was called;
        reserved memory there is none.
        """
        return MemoryStats(
            allocated_bytes=self.allocated_bytes,
            requested_bytes=self.allocated_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
        )

    def reset_peaks(self) -> None:
        """Let the peak begin anew at the present figure."""
        self.peak_allocated_bytes = self.allocated_bytes
