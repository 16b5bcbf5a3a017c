"""Expandable segments: one segment for each pool, mapped page by page.

It follows `ExpandableSegment`, `find_expandable_block`, `map_block` and `unmap_block` in PyTorch's
c10/cuda/CUDACachingAllocator.cpp. Pages of the small pool have 2 MiB, those of the large pool
`large_segment_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memcallback.core.units import GiB, round_up
from memcallback.prediction.allocator.blocks import Block, Pool, SimulatedDevice, by_address
from memcallback.prediction.allocator.settings import AllocatorSettings

#: The capacity that is assumed for addresses if it is unlimited: more than any card has. Only a
#: request that is larger still, as a search for the largest batch size makes, gets more.
_UNKNOWN_CAPACITY_BYTES = 1024 * GiB


class ExpandableBlock(Block):
    """A block of an expandable segment: in use, free, or unmapped (without memory behind it).

    Attributes:
        segment_address: Where its segment, and so its first page, begins.
    """

    __slots__ = ("segment_address",)

    segment_address: int

    def __init__(
        self,
        address: int,
        size_bytes: int,
        pool: Pool,
        previous: Block | None = None,
        following: Block | None = None,
    ) -> None:
        super().__init__(address, size_bytes, pool, previous, following)
        if isinstance(previous, ExpandableBlock):
            self.is_mapped, self.segment_address = previous.is_mapped, previous.segment_address
        else:
            self.is_mapped, self.segment_address = False, address


class ExpandablePool(Pool):
    """The free blocks of one stream, small or large: mapped ones as in any pool, and unmapped ones.

    Unmapped ones are ordered by address (`BlockComparatorAddress`).
    """

    __slots__ = ("_page_bytes", "_unmapped")

    def __init__(self, stream: int, *, is_small: bool, page_bytes: int) -> None:
        """Make an empty pool."""
        super().__init__(stream, is_small=is_small)
        self._page_bytes = page_bytes
        self._unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Add a free or unmapped block."""
        if block.is_mapped:
            super().add(block)
        else:
            insort(self._unmapped, block, key=by_address)

    def remove(self, block: Block) -> None:
        """Remove a free or unmapped block."""
        if block.is_mapped:
            super().remove(block)
        else:
            del self._unmapped[bisect_left(self._unmapped, block.address, key=by_address)]

    def take(self, block_bytes: int, settings: AllocatorSettings) -> Block | None:
        """Remove the best free block for a request (`get_free_block`); None if there is none.

        A block that can still grow counts with the size it can reach, so that holes are filled
        first.
        """
        blocks = self.blocks(block_bytes)
        best = next(blocks, None)
        if best is None:
            return None
        for block in blocks:
            if _size_with_growth(block) >= _size_with_growth(best):
                break
            best = block
        if not settings.serves(best.size_bytes, block_bytes):
            return None
        self.remove(best)
        return best

    def grow(
        self, block_bytes: int, settings: AllocatorSettings, device: SimulatedDevice
    ) -> Block | None:
        """Map pages at the lowest possible address until a free block is large enough.

        `try_allocate_expandable_block` in PyTorch.
        """
        return self.reserve(block_bytes, device)

    def reserve(self, block_bytes: int, device: SimulatedDevice) -> Block | None:
        """Map pages for a free block; None if less is left."""
        block = self._find(block_bytes) or self._new_segment(block_bytes, device)
        if not block.is_mapped:
            mapped = self._map(block, min(block.size_bytes, block_bytes), device)
            if mapped is None:
                return None
            block = mapped
        while block.size_bytes < block_bytes:
            after = block.next
            assert after is not None
            assert not after.is_mapped
            mapped = self._map(after, min(block_bytes - block.size_bytes, after.size_bytes), device)
            if mapped is None:
                return None
            block = mapped
        self.remove(block)
        return block

    def take_over(self, size_bytes: int, device: SimulatedDevice) -> Block | None:
        """Map a range that is mapped already; None if less is left."""
        return self.reserve(size_bytes, device)

    def release(self, block: Block, device: SimulatedDevice) -> None:
        """Unmap the whole pages inside a free block (`unmap_block`)."""
        assert isinstance(block, ExpandableBlock)
        start, page_bytes = block.segment_address, self._page_bytes
        first = start + round_up(block.address - start, page_bytes)
        end = start + (block.address + block.size_bytes - start) // page_bytes * page_bytes
        if first >= end:
            return
        self.remove(block)
        pages: Block = block
        if first > block.address:
            pages = block.split_off(first - block.address)
            self.add(block)
        if end < pages.address + pages.size_bytes:
            self.add(pages.split_off(end - pages.address))
        pages.is_mapped = False
        pages = self.put_back(pages)
        device.release(end - first)
        if not pages.is_split:  # the whole segment is unmapped
            self.remove(pages)
            del device.first_blocks[pages.address]

    def _find(self, block_bytes: int) -> Block | None:
        """The lowest free or unmapped block that can grow enough (`find_expandable_block`)."""
        for unmapped in self._unmapped:
            before = unmapped.previous
            first = unmapped if before is None or before.requested_bytes else before
            room_bytes, block = 0, first
            while room_bytes < block_bytes and not block.requested_bytes:
                room_bytes += block.size_bytes
                if block.next is None:
                    break
                block = block.next
            if room_bytes >= block_bytes:
                return first
        return None

    def _new_segment(self, block_bytes: int, device: SimulatedDevice) -> Block:
        """A segment of 1 1/8 of the device's memory, as one unmapped block."""
        capacity_bytes = device.capacity_bytes
        if capacity_bytes is None:
            capacity_bytes = max(_UNKNOWN_CAPACITY_BYTES, block_bytes)
        size_bytes = max(
            round_up(capacity_bytes + capacity_bytes // 8, self._page_bytes), self._page_bytes
        )
        block = ExpandableBlock(device.addresses.new(size_bytes), size_bytes, self)
        device.first_blocks[block.address] = block
        self.add(block)
        return block

    def _map(self, block: Block, size_bytes: int, device: SimulatedDevice) -> Block | None:
        """Map the first `size_bytes` of an unmapped block, rounded up to pages (`map_block`)."""
        mapped_bytes = round_up(size_bytes, self._page_bytes)
        if not device.reserve(mapped_bytes):
            return None
        self.remove(block)
        if mapped_bytes < block.size_bytes:
            self.add(block.split_off(mapped_bytes))
        block.is_mapped = True
        return self.put_back(block)


def _size_with_growth(block: Block) -> int:
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.is_mapped else 0)
