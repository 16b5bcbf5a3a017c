"""Expandable segments.

The rules are those of `ExpandableSegment`, `find_expandable_block`, `map_block` and `unmap_block`
in PyTorch's c10/cuda/CUDACachingAllocator.cpp. The pages of the small pool are 2 MiB, those of the
large pool `large_segment_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memcallback.core.units import GiB, round_up
from memcallback.prediction.allocator.blocks import Block, Device, Pool, by_address
from memcallback.prediction.allocator.settings import AllocatorSettings

#: Room for addresses where the capacity is not known: more than any card has.
_UNKNOWN_CAPACITY_BYTES = 1024 * GiB


class ExpandableBlock(Block):
    """A block of an expandable segment: in use, free, or without memory behind it.

    Attributes:
        segment_address: Where its segment and the first page of that begin.
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
    """The blocks of the small or of the large pool of one stream that are not in use.

    Those with memory behind them are as in any pool, those without it by address
    (`BlockComparatorAddress`, CUDACachingAllocator.cpp).
    """

    __slots__ = ("_page_bytes", "_unmapped")

    def __init__(self, stream: int, *, is_small: bool, page_bytes: int) -> None:
        """Make an empty pool."""
        super().__init__(stream, is_small=is_small)
        self._page_bytes = page_bytes
        self._unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Put in a block that is not in use."""
        if block.is_mapped:
            super().add(block)
        else:
            insort(self._unmapped, block, key=by_address)

    def remove(self, block: Block) -> None:
        """Take a block out."""
        if block.is_mapped:
            super().remove(block)
        else:
            del self._unmapped[bisect_left(self._unmapped, block.address, key=by_address)]

    def take(self, block_bytes: int, settings: AllocatorSettings) -> Block | None:
        """The free block that is used for a new one, taken out of the pool (`get_free_block`,
        CUDACachingAllocator.cpp).

        A block at the growing end counts as large as it can become, so that a smaller hole is
        filled before it.
        """
        blocks = self.blocks(block_bytes)
        found = next(blocks, None)
        if found is None:
            return None
        for following in blocks:
            if _room_bytes(following) >= _room_bytes(found):
                break
            found = following
        if not settings.serves(found.size_bytes, block_bytes):
            return None
        self.remove(found)
        return found

    def grow(self, block_bytes: int, settings: AllocatorSettings, device: Device) -> Block | None:
        """Put memory behind addresses until a free block is large enough, at the lowest place there
        is (`try_allocate_expandable_block`).
        """
        block = self._find(block_bytes) or self._new_segment(device)
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

    def give_back(self, block: Block, device: Device) -> None:
        """Give the whole pages inside a free block back to the device (`unmap_block`)."""
        assert isinstance(block, ExpandableBlock)
        start, page_bytes = block.segment_address, self._page_bytes
        first = start + round_up(block.address - start, page_bytes)
        end = start + (block.address + block.size_bytes - start) // page_bytes * page_bytes
        if first >= end:
            return
        self.remove(block)
        given: Block = block
        if first > block.address:
            given = block.split_off(first - block.address)
            self.add(block)
        if end < given.address + given.size_bytes:
            self.add(given.split_off(end - given.address))
        given.is_mapped = False
        given = self.put_back(given)
        device.give_back(end - first)
        if not given.is_split:  # nothing is left of its segment
            self.remove(given)
            del device.first_blocks[given.address]

    def _find(self, block_bytes: int) -> Block | None:
        """The lowest free or unmapped block from which on there is room (`find_expandable_block`)."""
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

    def _new_segment(self, device: Device) -> Block:
        """Addresses for 1 1/8 of the device's memory, as one unmapped block."""
        capacity_bytes = (
            _UNKNOWN_CAPACITY_BYTES if device.capacity_bytes is None else device.capacity_bytes
        )
        size_bytes = max(
            round_up(capacity_bytes + capacity_bytes // 8, self._page_bytes), self._page_bytes
        )
        block = ExpandableBlock(device.new_address(size_bytes), size_bytes, self)
        device.first_blocks[block.address] = block
        self.add(block)
        return block

    def _map(self, block: Block, size_bytes: int, device: Device) -> Block | None:
        """Put memory behind the first `size_bytes` of an unmapped block, rounded up to pages
        (`map_block`).
        """
        mapped_bytes = round_up(size_bytes, self._page_bytes)
        if not device.take(mapped_bytes):
            return None
        self.remove(block)
        if mapped_bytes < block.size_bytes:
            self.add(block.split_off(mapped_bytes))
        block.is_mapped = True
        return self.put_back(block)


def _room_bytes(block: Block) -> int:
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.is_mapped else 0)
