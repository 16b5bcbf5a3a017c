"""What the simulated allocator is made of: figures, the device that it takes memory from, blocks, pools of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

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
        first_blocks: The first block of each segment, by address.
    """

    __slots__ = ("_new_address", "_next_address", "capacity_bytes", "first_blocks", "reserved_bytes")

    def __init__(self, capacity_bytes: int | None, new_address: Callable[[int], int] | None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; a capacity is 0 or more bytes, or None for no end")
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.first_blocks: dict[int, Block] = {}
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
        pool: The pool it belongs to.
        pages: The pages of its segment if that is expandable; None if not.
        previous: The block before it in its segment; None if it is the first.
        next: The block after it in its segment; None if it is the last.
        requested_bytes: What was asked for, while it is in use.
        is_allocated: Handed out and not freed.
        is_active: Allocated, or freed but still in use by another stream.
        is_mapped: Has memory behind it; False only in expandable segments.
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
    )

    def __init__(self, address: int, size_bytes: int, pool: Pool, pages: Pages | None = None, previous: Block | None = None) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.pages = pages
        self.previous = previous
        self.next: Block | None = None
        self.requested_bytes = 0
        self.is_allocated = False
        self.is_active = False
        self.is_mapped = True

    @property
    def stream(self) -> int:
        """The stream it belongs to."""
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
        """Keep the first `size_bytes` and return the rest as a new block after this one."""
        rest = Block(self.address + size_bytes, self.size_bytes - size_bytes, self.pool, self.pages, self)
        rest.is_mapped = self.is_mapped
        rest.next = after = self.next
        if after is not None:
            after.previous = rest
        self.next = rest
        self.size_bytes = size_bytes
        return rest


class Pool:
    """The free blocks of the small or of the large pool of one stream.

    Mapped blocks are ordered by size and then by address (`BlockComparatorSize`), unmapped ones by address
    (`BlockComparatorAddress`, CUDACachingAllocator.cpp). Most of a training's blocks are of few sizes, so equal ones stand together.

    Attributes:
        stream: The stream.
        is_small: Whether it is the small pool.
    """

    __slots__ = ("_by_address", "_groups", "_sizes", "_unmapped", "is_small", "stream")

    def __init__(self, stream: int, *, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        #: The sizes of mapped blocks, in order.
        self._sizes: list[int] = []
        #: Size -> the addresses, negative and in order, so that the lowest address is the last, where it is taken from.
        self._groups: dict[int, list[int]] = {}
        self._unmapped: list[int] = []
        self._by_address: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Put in a block that is not in use."""
        address, size_bytes = block.address, block.size_bytes
        self._by_address[address] = block
        if not block.is_mapped:
            insort(self._unmapped, address)
            return
        group = self._groups.get(size_bytes)
        if group is None:
            self._groups[size_bytes] = [-address]
            insort(self._sizes, size_bytes)
        else:
            insort(group, -address)

    def put_back(self, block: Block) -> Block:
        """Put in a block that is no more in use, as one with the neighbours that are free and as mapped as it.

        Returns:
            That one: the first of them, which has grown; the others are no more (`try_merge_blocks`, CUDACachingAllocator.cpp).
        """
        before, after, is_mapped = block.previous, block.next, block.is_mapped
        if after is not None and not after.is_active and after.is_mapped == is_mapped:
            self.remove(after)
            _join(block, after)
        if before is not None and not before.is_active and before.is_mapped == is_mapped:
            self.remove(before)
            _join(before, block)
            block = before
        self.add(block)
        return block

    def remove(self, block: Block) -> None:
        """Take a block out."""
        address, size_bytes = block.address, block.size_bytes
        del self._by_address[address]
        if not block.is_mapped:
            del self._unmapped[bisect_left(self._unmapped, address)]
            return
        group = self._groups[size_bytes]
        if len(group) > 1:
            del group[bisect_left(group, -address)]
        else:
            del self._groups[size_bytes], self._sizes[bisect_left(self._sizes, size_bytes)]

    def take(self, block_bytes: int, settings: AllocatorSettings) -> Block | None:
        """The free block that is used for a new one, taken out of the pool (`get_free_block`, CUDACachingAllocator.cpp).

        It is the smallest that is large enough, of equal ones that with the lowest address.

        Returns:
            The block, not yet split; None if there is none.
        """
        sizes = self._sizes
        index = bisect_left(sizes, block_bytes)
        if index == len(sizes):
            return None
        size_bytes = sizes[index]
        if settings.expandable_segments:
            return self._take_expandable(index, block_bytes, settings)
        if settings.max_split_bytes is not None and not settings.serves(size_bytes, block_bytes):
            return None
        group = self._groups[size_bytes]
        if len(group) == 1:
            del self._groups[size_bytes], sizes[index]
        return self._by_address.pop(-group.pop())

    def _take_expandable(self, index: int, block_bytes: int, settings: AllocatorSettings) -> Block | None:
        """A block at the growing end counts as large as it can become, so that a smaller hole is filled before it."""
        blocks = map(self._by_address.__getitem__, self._addresses(index))
        found = next(blocks)
        for following in blocks:
            if _room_bytes(following) >= _room_bytes(found):
                break
            found = following
        if not settings.serves(found.size_bytes, block_bytes):
            return None
        self.remove(found)
        return found

    def mapped(self) -> list[Block]:
        """The free blocks with memory behind them, by size and then by address."""
        return [self._by_address[address] for address in self._addresses()]

    def unmapped(self) -> Iterator[Block]:
        """Ranges of expandable segments without memory behind them, by address."""
        return map(self._by_address.__getitem__, self._unmapped)

    def _addresses(self, first: int = 0) -> Iterator[int]:
        """By size, from the one at a position on, then by address."""
        return (-negative for size_bytes in self._sizes[first:] for negative in reversed(self._groups[size_bytes]))


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


def _join(block: Block, after: Block) -> None:
    """Make one block of two neighbours: the first grows, the other is no more."""
    block.size_bytes += after.size_bytes
    block.next = following = after.next
    if following is not None:
        following.previous = block
