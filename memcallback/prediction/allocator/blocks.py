"""The parts of a simulated allocator: blocks, pools of free blocks, and the device below."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from memcallback.prediction.allocator.addresses import Addresses
from memcallback.prediction.allocator.settings import AllocatorSettings

#: The order of free blocks of one size.
by_address = attrgetter("address")


class SimulatedDevice:
    """The memory that an allocator reserves, and the addresses of its segments.

    Attributes:
        addresses: Where segments lie.
        capacity_bytes: The most that can be reserved; None means unlimited.
        reserved_bytes: Reserved now.
        peak_reserved_bytes: The peak of it since the last reset.
        first_blocks: The first block of each segment, by address.
    """

    __slots__ = (
        "addresses",
        "capacity_bytes",
        "first_blocks",
        "peak_reserved_bytes",
        "reserved_bytes",
    )

    def __init__(self, capacity_bytes: int | None, addresses: Addresses | None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(
                f"capacity_bytes is {capacity_bytes}; a capacity is 0 or more bytes, or None for "
                "unlimited"
            )
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.first_blocks: dict[int, Block] = {}
        self.addresses = addresses or Addresses()

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much is left."""
        capacity_bytes = self.capacity_bytes
        return capacity_bytes is None or self.reserved_bytes + size_bytes <= capacity_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Reserve memory; False if less is left."""
        if not self.has_room(size_bytes):
            return False
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def release(self, size_bytes: int) -> None:
        """Release reserved memory."""
        self.reserved_bytes -= size_bytes
        assert self.reserved_bytes >= 0


class Block:
    """A range of addresses within one segment: in use or free.

    Attributes:
        address: Where it begins.
        size_bytes: Its length.
        pool: The pool it belongs to.
        previous: The block before it in its segment; None if it is the first.
        next: The block after it in its segment; None if it is the last.
        requested_bytes: The size that was requested, while in use; 0 while free.
        is_allocated: Allocated and not freed. A freed block stays in use while another stream uses
            it.
        is_mapped: Has memory behind it; False only in expandable segments.
    """

    __slots__ = (
        "address",
        "is_allocated",
        "is_mapped",
        "next",
        "pool",
        "previous",
        "requested_bytes",
        "size_bytes",
    )

    def __init__(
        self,
        address: int,
        size_bytes: int,
        pool: Pool,
        previous: Block | None = None,
        following: Block | None = None,
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.previous = previous
        self.next = following
        self.requested_bytes = 0
        self.is_allocated = False
        self.is_mapped = True

    @property
    def stream(self) -> int:
        """The stream of its pool."""
        return self.pool.stream

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.previous is not None or self.next is not None

    def and_following(self) -> Iterator[Block]:
        """This block and those after it in its segment, by address."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next

    def split_off(self, size_bytes: int) -> Block:
        """Keep the first `size_bytes`; return the rest as a new block behind it."""
        after = self.next
        rest = type(self)(
            self.address + size_bytes, self.size_bytes - size_bytes, self.pool, self, after
        )
        if after is not None:
            after.previous = rest
        self.next = rest
        self.size_bytes = size_bytes
        return rest

    def merge(self, after: Block) -> None:
        """Merge the next block of the segment into this one."""
        self.size_bytes += after.size_bytes
        self.next = following = after.next
        if following is not None:
            following.previous = self


class Pool:
    """The free blocks of one stream, small or large, ordered by size and then by address.

    The order is that of `BlockComparatorSize` (CUDACachingAllocator.cpp). Most blocks of a training
    have few sizes, so blocks of one size are grouped.

    Attributes:
        stream: The stream.
        is_small: Whether it is the small pool.
    """

    __slots__ = ("_groups", "_sizes", "is_small", "stream")

    def __init__(self, stream: int, *, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        #: The sizes, in order.
        self._sizes: list[int] = []
        #: Size -> the blocks, by address.
        self._groups: dict[int, list[Block]] = {}

    def add(self, block: Block) -> None:
        """Add a free block."""
        size_bytes = block.size_bytes
        group = self._groups.get(size_bytes)
        if group is None:
            self._groups[size_bytes] = [block]
            insort(self._sizes, size_bytes)
        else:
            insort(group, block, key=by_address)

    def put_back(self, block: Block) -> Block:
        """Add a block that was in use, merged with free neighbours of the same mapping."""
        before, after, is_mapped = block.previous, block.next, block.is_mapped
        block.requested_bytes = 0
        if after is not None and not after.requested_bytes and after.is_mapped == is_mapped:
            self.remove(after)
            block.merge(after)
        if before is not None and not before.requested_bytes and before.is_mapped == is_mapped:
            self.remove(before)
            before.merge(block)
            block = before
        self.add(block)
        return block

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        size_bytes = block.size_bytes
        group = self._groups[size_bytes]
        if len(group) > 1:
            del group[bisect_left(group, block.address, key=by_address)]
        else:
            del self._groups[size_bytes], self._sizes[bisect_left(self._sizes, size_bytes)]

    def take(self, block_bytes: int, settings: AllocatorSettings) -> Block | None:
        """Remove the smallest block that is large enough (`get_free_block`); None if there is none.

        Among blocks of one size it is the one with the lowest address.
        """
        sizes = self._sizes
        index = bisect_left(sizes, block_bytes)
        if index == len(sizes):
            return None
        size_bytes = sizes[index]
        if settings.max_split_bytes is not None and not settings.serves(size_bytes, block_bytes):
            return None
        group = self._groups[size_bytes]
        if len(group) == 1:
            del self._groups[size_bytes], sizes[index]
        return group.pop(0)

    def blocks(self, least_bytes: int = 0) -> Iterator[Block]:
        """The free, mapped blocks of at least a size, in order."""
        sizes = self._sizes[bisect_left(self._sizes, least_bytes) :]
        return (block for size_bytes in sizes for block in self._groups[size_bytes])

    def grow(
        self, block_bytes: int, settings: AllocatorSettings, device: SimulatedDevice
    ) -> Block | None:
        """Reserve a new segment for a block (`alloc_block`, CUDACachingAllocator.cpp)."""
        return self.reserve(settings.segment_bytes(block_bytes), device)

    def reserve(self, size_bytes: int, device: SimulatedDevice) -> Block | None:
        """Reserve a new segment; None if less is left."""
        return self._segment(size_bytes, device, device.addresses.new)

    def take_over(self, size_bytes: int, device: SimulatedDevice) -> Block | None:
        """Take over a segment that there is already; None if less is left."""
        return self._segment(size_bytes, device, device.addresses.known)

    def _segment(
        self, size_bytes: int, device: SimulatedDevice, address_of: Callable[[int], int]
    ) -> Block | None:
        if not device.reserve(size_bytes):
            return None
        address = address_of(size_bytes)
        block = device.first_blocks[address] = Block(address, size_bytes, self)
        return block

    def release(self, block: Block, device: SimulatedDevice) -> None:
        """Release a free block if it is a whole segment (`release_block`)."""
        if not block.is_split:
            self.remove(block)
            del device.first_blocks[block.address]
            device.release(block.size_bytes)
