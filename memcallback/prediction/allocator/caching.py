"""A simulation of PyTorch's CUDA caching allocator.

It follows `DeviceCachingAllocator` in PyTorch's c10/cuda/CUDACachingAllocator.cpp; names in
parentheses are functions there. Recorded histories of PyTorch 2.11 and of real GPUs confirm it. Not
simulated: private pools other than that of CUDA graphs (`torch.cuda.MemPool`), garbage collection
(`garbage_collection_threshold`), `Tensor.record_stream` and other users of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcallback.core.allocation_trace import GRAPH_POOL
from memcallback.core.step_memory import MemoryStats
from memcallback.core.units import format_bytes
from memcallback.prediction.allocator.addresses import Addresses
from memcallback.prediction.allocator.at_start import Part, Segment, total_bytes
from memcallback.prediction.allocator.blocks import Block, Pool, SimulatedDevice
from memcallback.prediction.allocator.expandable import ExpandablePool
from memcallback.prediction.allocator.settings import (
    SMALL_SEGMENT_BYTES,
    SMALL_SIZE_BYTES,
    AllocatorSettings,
)


class OutOfMemoryError(RuntimeError):
    """The simulated device has too little memory, even after the cache was released.

    Attributes:
        requested_bytes: The size that was requested.
        stats: The allocator at that moment.
        capacity_bytes: The most that it can reserve.
    """

    def __init__(
        self, requested_bytes: int, segment_bytes: int, stats: MemoryStats, capacity_bytes: int
    ) -> None:
        reserved_bytes, allocated_bytes = stats.reserved_bytes or 0, stats.allocated_bytes or 0
        super().__init__(
            f"Tried to allocate {format_bytes(segment_bytes)} of a capacity of "
            f"{format_bytes(capacity_bytes)}, of which "
            f"{format_bytes(capacity_bytes - reserved_bytes)} is free. "
            f"{format_bytes(allocated_bytes)} is allocated, and "
            f"{format_bytes(reserved_bytes - allocated_bytes)} is reserved but unallocated."
        )
        self.requested_bytes = requested_bytes
        self.stats = stats
        self.capacity_bytes = capacity_bytes


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        settings: Its settings.
        allocated_bytes: Bytes of allocated blocks: `torch.cuda.memory_allocated`.
        peak_allocated_bytes: The peak of it since the last `reset_peaks`.
        requested_bytes: The same before rounding.
        num_alloc_retries: How often the cache was released to allocate again.
        num_ooms: How often even that failed.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        capacity_bytes: int | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        """Make an empty allocator."""
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = self.peak_allocated_bytes = self.requested_bytes = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self._device = SimulatedDevice(capacity_bytes, addresses)
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}

    @property
    def reserved_bytes(self) -> int:
        """Reserved from the device: `torch.cuda.memory_reserved`."""
        return self._device.reserved_bytes

    @property
    def active_bytes(self) -> int:
        """Same as `allocated_bytes`: no block is freed while another stream still uses it."""
        return self.allocated_bytes

    @property
    def inactive_split_bytes(self) -> int:
        """Bytes of free blocks in partly used segments; expandable segments do not count."""
        if self.settings.expandable_segments:
            return 0
        free = (block for block in self._device.first_blocks.values() if not block.requested_bytes)
        return (
            self.reserved_bytes
            - self.active_bytes
            - sum(block.size_bytes for block in free if not block.is_split)
        )

    @property
    def num_segments(self) -> int:
        """Segments; as in `torch.cuda.memory_stats`, expandable ones do not count."""
        return 0 if self.settings.expandable_segments else len(self._device.first_blocks)

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Allocate a block (`malloc`)."""
        if size_bytes < 1:
            raise ValueError(
                f"size_bytes is {size_bytes}; an allocation has at least 1 byte: leave empty "
                "tensors out"
            )
        settings = self.settings
        block_bytes = settings.block_bytes(size_bytes)
        is_small = block_bytes <= SMALL_SIZE_BYTES
        pool = (self._small if is_small else self._large).get(stream) or self._pool(
            stream, is_small=is_small
        )
        block = pool.take(block_bytes, settings) or self._reserve(size_bytes, block_bytes, pool)
        # Split off the rest (`alloc_found_block`).
        free_bytes = block.size_bytes
        if free_bytes > block_bytes and settings.splits(
            block_bytes, free_bytes - block_bytes, is_small=is_small
        ):
            pool.add(block.split_off(block_bytes))
        self._activate(block, size_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free a block."""
        self._deallocate(block)
        self.requested_bytes -= block.requested_bytes
        block.pool.put_back(block)

    def empty_cache(self) -> None:
        """Release all free segments (`release_cached_blocks`): `torch.cuda.empty_cache`.

        The pool of CUDA graphs keeps its own, as a graph writes to them whenever it is replayed.
        """
        for pool in self._pools():
            if pool.stream == GRAPH_POOL:
                continue
            for block in list(pool.blocks()):
                pool.release(block, self._device)

    def adopt(self, segments: Sequence[Segment]) -> dict[int, Block]:
        """Take over segments, before the first allocation; none if they are too large.

        Nor if they are of another kind than the settings have, which can change in a program.

        Returns the blocks whose parts have an id, by it. Other blocks in use belong to others, and
        `allocated_bytes` leaves them out.
        """
        is_other_kind = any(
            segment.is_expandable is not self.settings.expandable_segments
            or (
                segment.is_expandable
                and segment.size_bytes % self._page_bytes(is_small=segment.is_small)
            )
            for segment in segments
        )
        if is_other_kind or not self._device.has_room(total_bytes(segments)):
            return {}
        free: list[Block] = []
        found: dict[int, Block] = {}
        for segment in segments:
            pool = self._pool(0, is_small=segment.is_small)
            block = pool.take_over(segment.size_bytes, self._device)
            assert block is not None
            for part in segment.parts:
                rest = (
                    block.split_off(part.size_bytes) if block.size_bytes > part.size_bytes else None
                )
                # A free one is in use, too, until all are there.
                block.requested_bytes = part.requested_bytes or part.size_bytes
                if part.id is not None:
                    self._activate(block, part.requested_bytes)
                    found[part.id] = block
                elif part.requested_bytes:
                    block.is_allocated = True
                else:
                    free.append(block)
                block = rest or block
        for block in free:
            block.pool.put_back(block)
        return found

    def segments(self) -> tuple[Segment, ...]:
        """The segments of the default stream, as `adopt` takes them."""
        return tuple(
            Segment(
                blocks[0].pool.is_small,
                tuple(Part(block.size_bytes, block.requested_bytes) for block in blocks),
                self.settings.expandable_segments,
            )
            for blocks in self.snapshot()
            if not blocks[0].stream
        )

    def stats(self) -> MemoryStats:
        """All values now, with the peaks since the last `reset_peaks`."""
        return MemoryStats(
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            active_bytes=self.active_bytes,
            inactive_split_bytes=self.inactive_split_bytes,
            requested_bytes=self.requested_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_reserved_bytes=self._device.peak_reserved_bytes,
            num_alloc_retries=self.num_alloc_retries,
            num_ooms=self.num_ooms,
        )

    def reset_peaks(self) -> None:
        """Restart the peaks at the values of now: `torch.cuda.reset_peak_memory_stats`."""
        self.peak_allocated_bytes = self.allocated_bytes
        self._device.peak_reserved_bytes = self._device.reserved_bytes

    def snapshot(self) -> list[list[Block]]:
        """The blocks of each segment, all by address.

        Each mapped range of an expandable segment counts as a segment.
        """
        segments: list[list[Block]] = []
        for _, first in sorted(self._device.first_blocks.items()):
            is_continued = False
            for block in first.and_following():
                if block.is_mapped and is_continued:
                    segments[-1].append(block)
                elif block.is_mapped:
                    segments.append([block])
                is_continued = block.is_mapped
        return segments

    def _pool(self, stream: int, *, is_small: bool) -> Pool:
        """A stream's small or large pool (`get_pool`)."""
        pools = self._small if is_small else self._large
        if stream not in pools:
            page_bytes = self._page_bytes(is_small=is_small)
            is_expandable = self.settings.expandable_segments
            pools[stream] = (
                ExpandablePool(stream, is_small=is_small, page_bytes=page_bytes)
                if is_expandable
                else Pool(stream, is_small=is_small)
            )
        return pools[stream]

    def _page_bytes(self, *, is_small: bool) -> int:
        """A page of an expandable segment."""
        return SMALL_SEGMENT_BYTES if is_small else self.settings.large_segment_bytes

    def _pools(self) -> Iterator[Pool]:
        """All pools, in the order in which they are released."""
        return (pools[stream] for pools in (self._large, self._small) for stream in sorted(pools))

    def _activate(self, block: Block, requested_bytes: int) -> None:
        block.is_allocated = True
        block.requested_bytes = requested_bytes
        self.requested_bytes += requested_bytes
        self.allocated_bytes = allocated_bytes = self.allocated_bytes + block.size_bytes
        if allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated_bytes

    def _deallocate(self, block: Block) -> None:
        if not block.is_allocated:
            raise ValueError(
                f"the block at address {block.address} is not allocated; a block is freed once, "
                "after it was allocated: leave this free out"
            )
        block.is_allocated = False
        self.allocated_bytes -= block.size_bytes

    def _reserve(self, size_bytes: int, block_bytes: int, pool: Pool) -> Block:
        """Reserve memory for a block, releasing the cache if the device is full (`malloc`)."""
        settings, device = self.settings, self._device
        block = pool.grow(block_bytes, settings, device)
        if block is None and self._release_oversize(block_bytes, pool):
            block = pool.grow(block_bytes, settings, device)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = pool.grow(block_bytes, settings, device)
        if block is None:
            self.num_ooms += 1
            assert device.capacity_bytes is not None
            raise OutOfMemoryError(
                size_bytes, settings.segment_bytes(block_bytes), self.stats(), device.capacity_bytes
            )
        return block

    def _release_oversize(self, block_bytes: int, pool: Pool) -> bool:
        """Release as many oversize free blocks as needed (`release_available_cached_blocks`).

        Oversize blocks are too large to be split. True if enough was released.
        """
        max_split_bytes = self.settings.max_split_bytes
        if max_split_bytes is None or self.settings.expandable_segments:
            return False
        needed_bytes = max(block_bytes, max_split_bytes)
        oversize = [block for block in pool.blocks(max_split_bytes) if not block.is_split]
        large_enough = next((block for block in oversize if block.size_bytes >= needed_bytes), None)
        if large_enough is not None:
            pool.release(large_enough, self._device)
            return True
        released_bytes = 0
        for block in reversed(oversize):
            if released_bytes >= needed_bytes:
                break
            released_bytes += block.size_bytes
            pool.release(block, self._device)
        return released_bytes >= needed_bytes
