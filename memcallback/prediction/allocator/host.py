"""A simulation of CPU memory: no rounding, no caching."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memcallback.core.step_memory import MemoryStats
from memcallback.prediction.allocator.caching import OutOfMemoryError


@dataclass(frozen=True, slots=True)
class HostBlock:
    """An allocated block.

    Attributes:
        size_bytes: The size that was requested.
    """

    size_bytes: int


class HostAllocator:
    """Counts live bytes.

    Attributes:
        allocated_bytes: Bytes of allocated blocks.
        peak_allocated_bytes: The peak of it since the last `reset_peaks`.
        num_alloc_retries: 0: there is no cache to release.
    """

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        """Make an empty allocator."""
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.num_alloc_retries = 0
        self._capacity_bytes = capacity_bytes

    def allocate(self, size_bytes: int, stream: int = 0) -> HostBlock:
        """Allocate a block."""
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
        """Free a block."""
        self.allocated_bytes -= block.size_bytes

    def empty_cache(self) -> None:
        """Release nothing: there is no cache."""

    def stats(self) -> MemoryStats:
        """All values now, with the peak since the last `reset_peaks`; nothing is reserved."""
        return MemoryStats(
            allocated_bytes=self.allocated_bytes,
            requested_bytes=self.allocated_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
        )

    def reset_peaks(self) -> None:
        """Restart the peak at the value of now."""
        self.peak_allocated_bytes = self.allocated_bytes
