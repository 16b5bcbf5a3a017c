"""What the simulated allocator is made of: figures, the device that it takes memory from, blocks, pools of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from memcallback.allocator_settings import AllocatorSettings
from memcallback.units import MiB, round_up

#: Where the segments of an imaginary device begin.
_FIRST_ADDRESS = 1 << 45
#: cudaMalloc gives ranges that begin at a multiple of this (every segment of the recorded histories does).
_ALIGNMENT_BYTES = 2 * MiB


class Gauge:
    """A figure and the largest it has been.

    Attributes:
        current: Now.
        peak: The largest since the allocator was made or its peaks were reset.
    """

    __slots__ = ("current", "peak")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0

    def add(self, change: int) -> None:
        """Change the figure; negative for less."""
        self.current += change
        if self.current > self.peak:
            self.peak = self.current


class Device:
    """The memory that the allocator takes from its device, and the addresses it gets.

    Attributes:
        capacity_bytes: What the allocator can have in all; None means no end.
        reserved_bytes: What it has.
    """

    __slots__ = ("_new_address", "_next_address", "capacity_bytes", "reserved_bytes")

    def __init__(self, capacity_bytes: int | None, new_address: Callable[[int], int] | None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; a capacity is 0 or more bytes, or None for no end")
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self._new_address = new_address or self._above_the_last
        self._next_address = _FIRST_ADDRESS

    def take(self, size_bytes: int) -> bool:
        """Reserve memory; False if there is not so much left."""
        if self.capacity_bytes is not None and self.reserved_bytes + size_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """The opposite of `take`."""
        self.reserved_bytes -= size_bytes
        assert self.reserved_bytes >= 0

    def new_address(self, size_bytes: int) -> int:
        """Where a new range of addresses begins."""
        return self._new_address(size_bytes)

    def _above_the_last(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += round_up(size_bytes, _ALIGNMENT_BYTES)
        return address


@dataclass(frozen=True, slots=True)
class Pages:
    """How an expandable segment is divided.

    Attributes:
        address: Where the segment and its first page begin.
        size_bytes: The size of a page.
    """

    address: int
    size_bytes: int


class Block:
    """A range of addresses within one segment: in use, free, or (in an expandable segment) without memory behind it.

    Attributes:
        address: Where it begins.
        size_bytes: Its length.
        stream: The stream it belongs to.
        pool: The pool it belongs to.
        previous: The block before it in its segment; None if it is the first.
        next: The block after it in its segment; None if it is the last.
        requested_bytes: What was asked for, while it is in use.
        is_allocated: Handed out and not freed.
        is_active: Allocated, or freed but still in use by another stream.
        is_mapped: Has memory behind it; False only in expandable segments.
        pages: The pages of its segment if that is expandable; None if not.
    """

    __slots__ = (
        "address",
        "is_active",
        "is_allocated",
        "is_mapped",
        "next",
        "pages",
        "pool",
        "previous",
        "requested_bytes",
        "size_bytes",
        "stream",
    )

    def __init__(self, address: int, size_bytes: int, stream: int, pool: Pool, pages: Pages | None = None) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.stream = stream
        self.pool = pool
        self.pages = pages
        self.previous: Block | None = None
        self.next: Block | None = None
        self.requested_bytes = 0
        self.is_allocated = False
        self.is_active = False
        self.is_mapped = True

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.previous is not None or self.next is not None

    def split_off(self, size_bytes: int) -> Block:
        """Keep the first `size_bytes` and return the rest as a new block after this one."""
        rest = Block(self.address + size_bytes, self.size_bytes - size_bytes, self.stream, self.pool, self.pages)
        rest.is_mapped = self.is_mapped
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size_bytes = size_bytes
        return rest

    def merge_neighbours(self) -> int:
        """Take in the neighbours that are free and as mapped as this one, out of their pool (`try_merge_blocks`, CUDACachingAllocator.cpp).

        Returns:
            The bytes taken in.
        """
        size_bytes = self.size_bytes
        before, after = self.previous, self.next
        if before is not None and not before.is_active and before.is_mapped == self.is_mapped:
            self.pool.remove(before)
            self.address = before.address
            self.size_bytes += before.size_bytes
            self.previous = before.previous
            if self.previous is not None:
                self.previous.next = self
        if after is not None and not after.is_active and after.is_mapped == self.is_mapped:
            self.pool.remove(after)
            self.size_bytes += after.size_bytes
            self.next = after.next
            if self.next is not None:
                self.next.previous = self
        return self.size_bytes - size_bytes


class _FreeBlocks:
    """The free blocks of one stream with memory behind them. Most of a training's blocks are of few sizes, so equal ones stand together."""

    __slots__ = ("groups", "sizes")

    def __init__(self) -> None:
        #: The sizes there are, in order.
        self.sizes: list[int] = []
        #: Size -> the addresses, negative and in order, so that the lowest address is the last, where it is taken from.
        self.groups: dict[int, list[int]] = {}

    def addresses(self, first: int = 0) -> Iterator[int]:
        """By size, from the one at a position on, then by address."""
        return (-negative for size_bytes in self.sizes[first:] for negative in reversed(self.groups[size_bytes]))


class Pool:
    """The free blocks of the small or of the large pool, by stream.

    Mapped blocks are ordered by size and then by address (`BlockComparatorSize`), unmapped ones by address
    (`BlockComparatorAddress`, CUDACachingAllocator.cpp).
    """

    __slots__ = ("_by_address", "_mapped", "_unmapped", "is_small")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self._mapped: dict[int, _FreeBlocks] = {}
        self._unmapped: dict[int, list[int]] = {}
        self._by_address: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Put in a block that is not in use."""
        address, size_bytes = block.address, block.size_bytes
        self._by_address[address] = block
        if not block.is_mapped:
            insort(self._unmapped.setdefault(block.stream, []), address)
            return
        free = self._mapped.get(block.stream)
        if free is None:
            free = self._mapped[block.stream] = _FreeBlocks()
        group = free.groups.get(size_bytes)
        if group is None:
            free.groups[size_bytes] = [-address]
            insort(free.sizes, size_bytes)
        else:
            insort(group, -address)

    def remove(self, block: Block) -> None:
        """Take a block out."""
        address, size_bytes = block.address, block.size_bytes
        del self._by_address[address]
        if not block.is_mapped:
            addresses = self._unmapped[block.stream]
            del addresses[bisect_left(addresses, address)]
            return
        free = self._mapped[block.stream]
        group = free.groups[size_bytes]
        if len(group) > 1:
            del group[bisect_left(group, -address)]
        else:
            del free.groups[size_bytes], free.sizes[bisect_left(free.sizes, size_bytes)]

    def take(self, block_bytes: int, stream: int, settings: AllocatorSettings) -> Block | None:
        """The free block that is used for a new one, taken out of the pool (`get_free_block`, CUDACachingAllocator.cpp).

        It is the smallest that is large enough, of equal ones that with the lowest address.

        Returns:
            The block, not yet split; None if there is none.
        """
        free = self._mapped.get(stream)
        if free is None:
            return None
        sizes = free.sizes
        index = bisect_left(sizes, block_bytes)
        if index == len(sizes):
            return None
        block = self._by_address[-free.groups[sizes[index]][-1]]
        if block.pages:
            # A block at the growing end counts as large as it can become, so that a smaller hole is filled before it.
            for following in map(self._by_address.__getitem__, islice(free.addresses(index), 1, None)):
                if _room_bytes(following) >= _room_bytes(block):
                    break
                block = following
        if settings.max_split_bytes is not None and not settings.serves(block.size_bytes, block_bytes):
            return None
        self.remove(block)
        return block

    def mapped(self) -> list[Block]:
        """The free blocks with memory behind them, in the order in which they are released."""
        return [self._by_address[address] for stream in sorted(self._mapped) for address in self._mapped[stream].addresses()]

    def around(self, block_bytes: int, stream: int) -> tuple[list[Block], list[Block]]:
        """The free blocks of one stream below a size and from it on, each in order of size."""
        free = self._mapped.get(stream)
        blocks = [self._by_address[address] for address in free.addresses()] if free else []
        return [one for one in blocks if one.size_bytes < block_bytes], [one for one in blocks if one.size_bytes >= block_bytes]

    def unmapped(self, stream: int) -> Iterator[Block]:
        """Ranges of one stream's expandable segments without memory behind them, by address."""
        return (self._by_address[address] for address in self._unmapped.get(stream, ()))


def tile(address: int, size_bytes: int, blocks: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The allocated blocks of a segment with the gaps between them as blocks of 0 requested bytes."""
    tiles, end = [], address
    for block_address, requested_bytes, block_bytes in blocks:
        if block_address < end or not 1 <= requested_bytes <= block_bytes:
            raise ValueError(
                f"the block at {block_address} asks for {requested_bytes} of {block_bytes} bytes after an end at {end}; "
                "blocks do not overlap and hold what was asked for: give them by address"
            )
        if block_address > end:
            tiles.append((end, 0, block_address - end))
        tiles.append((block_address, requested_bytes, block_bytes))
        end = block_address + block_bytes
    if end > address + size_bytes:
        raise ValueError(
            f"the blocks of the segment at {address} end at {end}; it ends at {address + size_bytes}: leave out what is not inside"
        )
    if end < address + size_bytes:
        tiles.append((end, 0, address + size_bytes - end))
    return tiles


def _room_bytes(block: Block) -> int:
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.is_mapped else 0)
