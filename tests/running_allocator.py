"""The simulated allocator with what only recorded histories need.

Segments of a running program, and frees that wait for another stream.
"""

from memcallback.prediction.allocator.blocks import Block
from memcallback.prediction.allocator.caching import CachingAllocator


class RunningAllocator(CachingAllocator):
    """An allocator that takes over segments, and whose blocks other streams may still use."""

    def __init__(self, settings=None, **options):
        super().__init__(settings, **options)
        self._pending = {}

    @property
    def active_bytes(self):
        """Allocated, and freed but still in use by another stream."""
        return self.allocated_bytes + sum(block.size_bytes for block in self._pending.values())

    def request_free(self, block):
        """Free a block that another stream still uses (`Tensor.record_stream`): it stays active."""
        self._deallocate(block)
        self._pending[block.address] = block

    def complete_free(self, block):
        """No stream uses the block any more: it is free for reuse."""
        if self._pending.get(block.address) is not block:
            raise ValueError(
                f"the block at address {block.address} awaits no end of its use; call request_free "
                "before complete_free"
            )
        del self._pending[block.address]
        self.requested_bytes -= block.requested_bytes
        block.pool.put_back(block)

    def empty_cache(self):
        """Wait for the other streams, then give back what is wholly free."""
        for block in list(self._pending.values()):
            self.complete_free(block)
        super().empty_cache()

    def adopt_segment(self, address, size_bytes, stream, *, is_small, blocks=()):
        """Take over a segment of a running program, as in its `torch.cuda.memory._snapshot`."""
        if self.settings.expandable_segments:
            raise ValueError(
                "expandable segments cannot be adopted; a simulation of them starts empty: set "
                "expandable_segments to False"
            )
        tiles = tile(address, size_bytes, blocks)
        if not self._device.reserve(size_bytes):
            raise ValueError(
                f"the segment at {address} of {size_bytes} bytes is more than capacity_bytes has "
                "left; give a larger capacity"
            )
        pool = self._pool(stream, is_small=is_small)
        adopted, previous = [], None
        for block_address, requested_bytes, block_bytes in tiles:
            block = Block(block_address, block_bytes, pool, previous=previous)
            if previous is None:
                self._device.first_blocks[block_address] = block
            else:
                previous.next = block
            previous = block
            if requested_bytes:
                self._activate(block, requested_bytes)
                adopted.append(block)
            else:
                pool.add(block)
        return adopted


def tile(address, size_bytes, blocks):
    """The allocated blocks of a segment; the gaps between them are blocks of 0 requested bytes."""
    tiles, end = [], address
    for block_address, requested_bytes, block_bytes in blocks:
        if block_address < end or not 1 <= requested_bytes <= block_bytes:
            raise ValueError(
                f"the block at {block_address} asks for {requested_bytes} of {block_bytes} bytes "
                f"after an end at {end}; blocks do not overlap and hold what was asked for: give "
                "them by address"
            )
        if block_address > end:
            tiles.append((end, 0, block_address - end))
        tiles.append((block_address, requested_bytes, block_bytes))
        end = block_address + block_bytes
    if end > address + size_bytes:
        raise ValueError(
            f"the blocks of the segment at {address} end at {end}; it ends at "
            f"{address + size_bytes}: leave out what is not inside"
        )
    if end < address + size_bytes:
        tiles.append((end, 0, address + size_bytes - end))
    return tiles
