"""Recorded histories of the real caching allocator, replayed on the simulated one: the format is that of tests/recorded/README.md."""

import gzip
import json
from collections import Counter, deque
from dataclasses import dataclass, field

from memcallback.allocator import CachingAllocator
from memcallback.allocator_settings import AllocatorSettings
from memcallback.units import MiB, round_up


def load(path):
    with gzip.open(path) as file:
        return json.load(file)


@dataclass
class Agreement:
    """How far a replay went as the history says: what was compared, and the first differences in words."""

    compared: Counter = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def same(self, what, simulated, recorded, index):
        self.compared[what] += 1
        if simulated != recorded:
            self.differences.append(f"event {index}: {what} is {simulated}, recorded {recorded}")


class Replay:
    """Each recorded request is put to the simulated allocator, which must hand out the recorded address.

    The addresses of new segments are the driver's choice, so they come from the history. Segments freed one after the
    other are an `empty_cache`, or the same inside a retry.
    """

    def __init__(self, history):
        self.history = history
        self.agreement = Agreement()
        self.new = deque()
        settings = AllocatorSettings.parse((history["meta"].get("settings") or {}).get("PYTORCH_CUDA_ALLOC_CONF", ""))
        self.allocator = CachingAllocator(settings, new_address=self.recorded_address)
        self.blocks = {}
        self.reserved = sum(size for _, size, *_ in history["initial_segments"])
        self.adopt()

    def adopt(self):
        blocks = deque(sorted(self.history["initial_blocks"]))
        for address, size, stream, pool in sorted(self.history["initial_segments"]):
            inside = []
            while blocks and blocks[0][0] < address + size:
                inside.append(blocks.popleft())
            ends = [*(block[0] for block in inside[1:]), address + size]
            known = [(a, r, s or self.inferred_bytes(a, r, end, pool)) for (a, r, s), end in zip(inside, ends, strict=False)]
            for block in self.allocator.adopt_segment(address, size, stream, is_small=pool == "small", blocks=known):
                self.blocks[block.address] = block

    def inferred_bytes(self, address, requested_bytes, end, pool):
        """The size of a block that was there before recording began, of which the history has only the request.

        In the large pool up to 1 MiB behind it may belong to it. Free blocks of that pool are larger than that; a free
        block behind it is used from its beginning, so the first address that is handed out there is where it ends.
        """
        block_bytes = round_up(requested_bytes, 512)
        rest_bytes = end - address - block_bytes
        if pool == "small" or rest_bytes == 0:
            return block_bytes
        if rest_bytes <= MiB:
            return block_bytes + rest_bytes
        for code, other, *_ in self.history["events"]:
            if code == "f" and other == address:
                break
            if code == "a" and address < other < end:
                return other - address if other - address - block_bytes <= MiB else block_bytes
        return block_bytes

    def recorded_address(self, size_bytes):
        address, recorded_bytes = self.new.popleft()
        if not self.allocator.settings.expandable_segments:
            self.agreement.same("segment size", size_bytes, recorded_bytes, self.index)
        return address

    def run(self):
        events = self.history["events"]
        self.index = 0
        while self.index < len(events):
            code, address, size_bytes, stream = events[self.index]
            getattr(self, f"on_{code}")(address, size_bytes, stream)
            self.index += 1
            self.compare_figures()
        return self.agreement

    def on_S(self, address, size_bytes, stream):
        self.new.append((address, size_bytes))
        self.reserved += size_bytes

    def on_a(self, address, size_bytes, stream):
        block = self.allocator.allocate(size_bytes, stream)
        self.agreement.same("address", block.address, address, self.index)
        self.blocks[address] = block

    def on_r(self, address, size_bytes, stream):
        self.allocator.request_free(self.blocks[address])

    def on_f(self, address, size_bytes, stream):
        self.allocator.complete_free(self.blocks.pop(address))

    def on_F(self, address, size_bytes, stream):
        events = self.history["events"]
        self.reserved -= size_bytes
        while self.index + 1 < len(events) and events[self.index + 1][0] == "F":
            self.index += 1
            self.reserved -= events[self.index][2]
        self.allocator.empty_cache()

    def compare_figures(self):
        if not self.new:
            self.agreement.same("reserved", self.allocator.reserved.current, self.reserved, self.index)

