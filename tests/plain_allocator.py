"""The allocator's rules without any cleverness: every question is answered by looking at every
block. No expandable segments.
"""

from dataclasses import dataclass

from memcallback.core.step_memory import MemoryStats
from memcallback.core.units import MiB
from memcallback.prediction.allocator import blocks
from memcallback.prediction.allocator.caching import OutOfMemoryError
from memcallback.prediction.allocator.settings import AllocatorSettings


@dataclass(eq=False)
class PlainBlock:
    address: int
    size_bytes: int
    requested_bytes: int = 0
    is_allocated: bool = False

    @property
    def is_active(self):
        return self.requested_bytes > 0


@dataclass(eq=False)
class PlainSegment:
    size_bytes: int
    stream: int
    is_small: bool
    blocks: list[PlainBlock]

    @property
    def is_free(self):
        return not any(block.is_active for block in self.blocks)


def rounded(size_bytes, divisions):
    step = 512
    if divisions > 1 and size_bytes > 512 * divisions:
        power = 1
        while power * 2 <= size_bytes:
            power *= 2
        step = power // divisions
    return -(-size_bytes // step) * step


class PlainAllocator:
    def __init__(self, settings: AllocatorSettings, capacity_bytes):
        self.divisions = settings.roundup_power2_divisions[0]
        self.large_bytes = settings.large_segment_bytes
        self.max_split_bytes = settings.max_split_bytes or 2**60
        self.capacity_bytes = capacity_bytes or 2**60
        self.addresses = blocks.Addresses()
        self.segments = []
        self.num_alloc_retries = self.num_ooms = 0

    def figures(self):
        pairs = [(segment, block) for segment in self.segments for block in segment.blocks]
        return {
            "requested": sum(block.requested_bytes for _, block in pairs if block.is_active),
            "allocated": sum(block.size_bytes for _, block in pairs if block.is_allocated),
            "active": sum(block.size_bytes for _, block in pairs if block.is_active),
            "inactive_split": sum(
                block.size_bytes
                for segment, block in pairs
                if len(segment.blocks) > 1 and not block.is_active
            ),
            "reserved": sum(segment.size_bytes for segment in self.segments),
            "segments": len(self.segments),
        }

    def allocate(self, size_bytes, stream):
        block_bytes = rounded(size_bytes, self.divisions)
        is_small = block_bytes <= MiB
        found = self.best(block_bytes, stream, is_small) or self.new_segment(
            block_bytes, stream, is_small
        )
        segment, block = found
        rest_bytes = block.size_bytes - block_bytes
        if (
            rest_bytes >= 512
            if is_small
            else rest_bytes > MiB and block_bytes < self.max_split_bytes
        ):
            block.size_bytes = block_bytes
            segment.blocks.insert(
                segment.blocks.index(block) + 1, PlainBlock(block.address + block_bytes, rest_bytes)
            )
        block.requested_bytes, block.is_allocated = size_bytes, True
        return block

    def best(self, block_bytes, stream, is_small):
        fitting = [
            (block.size_bytes, block.address, segment, block)
            for segment in self.segments
            for block in segment.blocks
            if not block.is_active
            and segment.stream == stream
            and segment.is_small == is_small
            and block.size_bytes >= block_bytes
        ]
        if not fitting:
            return None
        size_bytes, _, segment, block = min(fitting, key=lambda found: found[:2])
        if block_bytes < self.max_split_bytes <= size_bytes:
            return None
        if block_bytes >= self.max_split_bytes and size_bytes >= block_bytes + self.large_bytes:
            return None
        return segment, block

    def new_segment(self, block_bytes, stream, is_small):
        if is_small:
            size_bytes = 2 * MiB
        elif block_bytes < 10 * MiB:
            size_bytes = self.large_bytes
        else:
            size_bytes = -(-block_bytes // (2 * MiB)) * 2 * MiB
        if not self.has_room(size_bytes) and not (
            self.give_back_oversize(block_bytes, stream, is_small) and self.has_room(size_bytes)
        ):
            self.empty_cache()
            self.num_alloc_retries += 1
            if not self.has_room(size_bytes):
                self.num_ooms += 1
                raise OutOfMemoryError(block_bytes, size_bytes, MemoryStats(), self.capacity_bytes)
        address = self.addresses.new(size_bytes)
        segment = PlainSegment(size_bytes, stream, is_small, [PlainBlock(address, size_bytes)])
        self.segments.append(segment)
        return segment, segment.blocks[0]

    def has_room(self, size_bytes):
        return self.figures()["reserved"] + size_bytes <= self.capacity_bytes

    def give_back_oversize(self, block_bytes, stream, is_small):
        if self.max_split_bytes == 2**60:
            return False
        needed_bytes = max(block_bytes, self.max_split_bytes)
        oversize = [
            segment
            for segment in self.segments
            if segment.is_free
            and segment.stream == stream
            and segment.is_small == is_small
            and segment.size_bytes >= self.max_split_bytes
        ]
        oversize.sort(key=lambda segment: (segment.size_bytes, segment.blocks[0].address))
        enough = [segment for segment in oversize if segment.size_bytes >= needed_bytes]
        if enough:
            self.segments.remove(enough[0])
            return True
        released_bytes = 0
        while oversize and released_bytes < needed_bytes:
            segment = oversize.pop()
            released_bytes += segment.size_bytes
            self.segments.remove(segment)
        return released_bytes >= needed_bytes

    def free(self, block):
        self.request_free(block)
        self.complete_free(block)

    def request_free(self, block):
        block.is_allocated = False

    def complete_free(self, block):
        block.requested_bytes = 0
        segment = next(segment for segment in self.segments if block in segment.blocks)
        merged = []
        for each in segment.blocks:
            if merged and not each.is_active and not merged[-1].is_active:
                merged[-1] = PlainBlock(merged[-1].address, merged[-1].size_bytes + each.size_bytes)
            else:
                merged.append(each)
        segment.blocks = merged

    def empty_cache(self):
        for segment in self.segments:
            for block in list(segment.blocks):
                if block.is_active and not block.is_allocated:
                    self.complete_free(block)
        self.segments = [segment for segment in self.segments if not segment.is_free]
