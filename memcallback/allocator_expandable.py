"""Expandable segments: ranges of addresses much larger than their memory, which grow and shrink by pages.

The rules are those of `ExpandableSegment`, `find_expandable_block`, `map_block` and `unmap_block` in PyTorch's
c10/cuda/CUDACachingAllocator.cpp. The pages of the small pool are 2 MiB, those of the large pool `large_segment_bytes`.
"""

from __future__ import annotations

from memcallback.allocator_blocks import Block, Device, Pages, Pool
from memcallback.units import GiB, round_up

#: Room for addresses where the capacity is not known: more than any card has.
_UNKNOWN_CAPACITY_BYTES = 1024 * GiB


def grow(pool: Pool, block_bytes: int, page_bytes: int, device: Device) -> Block | None:
    """Put memory behind addresses until a free block is large enough, at the lowest place there is (`try_allocate_expandable_block`).

    Args:
        pool: Where the block is to be.
        block_bytes: The size needed.
        page_bytes: The page of this pool.
        device: Where the memory comes from.

    Returns:
        The block, taken out of the pool; None if the device is full, where pages mapped before that stay.
    """
    block = _find(pool, block_bytes) or _new_segment(pool, page_bytes, device)
    if not block.is_mapped:
        mapped = _map(block, min(block.size_bytes, block_bytes), device)
        if mapped is None:
            return None
        block = mapped
    while block.size_bytes < block_bytes:
        after = block.next
        assert after is not None
        assert not after.is_mapped
        mapped = _map(after, min(block_bytes - block.size_bytes, after.size_bytes), device)
        if mapped is None:
            return None
        block = mapped
    pool.remove(block)
    return block


def shrink(block: Block, device: Device) -> None:
    """Give back the whole pages inside a free block (`unmap_block`)."""
    assert block.pages is not None
    start, page_bytes, pool = block.pages.address, block.pages.size_bytes, block.pool
    first = start + round_up(block.address - start, page_bytes)
    end = start + (block.address + block.size_bytes - start) // page_bytes * page_bytes
    if first >= end:
        return
    pool.remove(block)
    if first > block.address:
        before, block = block, block.split_off(first - block.address)
        pool.add(before)
    if end < block.address + block.size_bytes:
        pool.add(block.split_off(end - block.address))
    block.is_mapped = False
    block = pool.put_back(block)
    device.give_back(end - first)
    if not block.is_split:  # nothing is left of its segment
        pool.remove(block)
        del device.first_blocks[block.address]


def _find(pool: Pool, block_bytes: int) -> Block | None:
    """The lowest free or unmapped block from which on there is room (`find_expandable_block`)."""
    for unmapped in pool.unmapped():
        before = unmapped.previous
        first = unmapped if before is None or before.is_active else before
        room_bytes, block = 0, first
        while room_bytes < block_bytes and not block.is_active:
            room_bytes += block.size_bytes
            if block.next is None:
                break
            block = block.next
        if room_bytes >= block_bytes:
            return first
    return None


def _new_segment(pool: Pool, page_bytes: int, device: Device) -> Block:
    """Addresses for 1 1/8 of the device's memory, as one unmapped block."""
    capacity_bytes = _UNKNOWN_CAPACITY_BYTES if device.capacity_bytes is None else device.capacity_bytes
    size_bytes = max(round_up(capacity_bytes + capacity_bytes // 8, page_bytes), page_bytes)
    address = device.new_address(size_bytes)
    block = Block(address, size_bytes, pool, Pages(address, page_bytes))
    block.is_mapped = False
    device.first_blocks[address] = block
    pool.add(block)
    return block


def _map(block: Block, size_bytes: int, device: Device) -> Block | None:
    """Put memory behind the first `size_bytes` of an unmapped block, rounded up to pages (`map_block`).

    Returns:
        The free block of which that is the end now; None if the device is full.
    """
    assert block.pages is not None
    pool, mapped_bytes = block.pool, round_up(size_bytes, block.pages.size_bytes)
    if not device.take(mapped_bytes):
        return None
    pool.remove(block)
    if mapped_bytes < block.size_bytes:
        pool.add(block.split_off(mapped_bytes))
    block.is_mapped = True
    return pool.put_back(block)
