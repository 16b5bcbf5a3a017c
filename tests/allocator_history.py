"""Recorded histories of the real caching allocator, replayed on the simulated one: the format is
that of tests/recorded/README.md.
"""

import gzip
import json
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace

from running_allocator import RunningAllocator

from memcallback.core.units import MiB, round_up
from memcallback.prediction.allocator.caching import OutOfMemoryError
from memcallback.prediction.allocator.settings import AllocatorSettings


def load(path):
    with gzip.open(path) as file:
        history = json.load(file)
    if history.get("addresses") == "differences":
        for event, address in zip(
            history["events"], accumulate(event[1] for event in history["events"]), strict=True
        ):
            event[1] = address
    return history


@dataclass
class Agreement:
    """How far a replay went as the history says: what was compared, and the first differences in
    words.
    """

    compared: Counter = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def same(self, what, simulated, recorded, index):
        self.compared[what] += 1
        if simulated != recorded:
            self.differences.append(f"event {index}: {what} is {simulated}, recorded {recorded}")


class Replay:
    """Each recorded request is put to the simulated allocator, which must hand out the recorded
    address.

    The addresses of new segments are the driver's choice, so they come from the history. Where the
    history has a capacity, the simulation finds out by itself when to give segments back; else
    segments freed are an `empty_cache`, or the same inside a retry.
    """

    def __init__(self, history):
        self.history = history
        self.events = history["events"]
        self.index = 0
        self.agreement = Agreement()
        self.new = deque()
        meta = history["meta"]
        settings = AllocatorSettings.parse(
            (meta["settings"] or {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
        )
        self.capacity_bytes = meta.get("capacity_bytes")
        self.allocator = RunningAllocator(
            settings,
            capacity_bytes=self.capacity_bytes,
            addresses=SimpleNamespace(new=self.recorded_address),
        )
        self.blocks = {}
        self.reserved = sum(size for _, size, *_ in history["initial_segments"])
        self.reported = reported(history.get("figures", []))
        self.peaks = {}
        self.adopt()
        self.follow_peaks()

    def adopt(self):
        blocks = deque(sorted(self.history["initial_blocks"]))
        for address, size, stream, pool in sorted(self.history["initial_segments"]):
            inside = []
            while blocks and blocks[0][0] < address + size:
                inside.append(blocks.popleft())
            ends = [*(block[0] for block in inside[1:]), address + size]
            known = [
                (a, r, s or self.inferred_bytes(a, r, end, pool))
                for (a, r, s), end in zip(inside, ends, strict=False)
            ]
            for block in self.allocator.adopt_segment(
                address, size, stream, is_small=pool == "small", blocks=known
            ):
                self.blocks[block.address] = block

    def inferred_bytes(self, address, requested_bytes, end, pool):
        """The size of a block that was there before recording began, of which the history has only
        the request.

        In the large pool up to 1 MiB behind it may belong to it. Free blocks of that pool are
        larger than that; a free block behind it is used from its beginning, so the first address
        that is handed out there is where it ends.
        """
        block_bytes = round_up(requested_bytes, 512)
        rest_bytes = end - address - block_bytes
        if pool == "small" or rest_bytes == 0:
            return block_bytes
        if rest_bytes <= MiB:
            return block_bytes + rest_bytes
        for code, other, *_ in self.events:
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
        while self.index < len(self.events):
            code, address, size_bytes, stream = self.events[self.index]
            getattr(self, f"on_{code}")(address, size_bytes, stream)
            self.compare(code)
            self.follow_peaks()
            self.index += 1
        return self.agreement

    def follow_peaks(self):
        """The largest of each figure of which the simulation itself keeps no peak."""
        for name in ("active_bytes", "inactive_split_bytes", "requested_bytes", "num_segments"):
            self.peaks[name] = max(self.peaks.get(name, 0), getattr(self.allocator, name))

    def on_S(self, address, size_bytes, stream):
        self.new.append((address, size_bytes))
        self.reserved += size_bytes

    on_M = on_S

    def on_a(self, address, size_bytes, stream):
        block = self.allocator.allocate(size_bytes, stream)
        self.agreement.same("address", block.address, address, self.index)
        self.blocks[address] = block
        self.new.clear()

    def on_r(self, address, size_bytes, stream):
        self.allocator.request_free(self.blocks[address])

    def on_f(self, address, size_bytes, stream):
        self.allocator.complete_free(self.blocks.pop(address))

    def on_F(self, address, size_bytes, stream):
        self.reserved -= size_bytes
        is_last = self.index + 1 == len(self.events) or self.events[self.index + 1][0] not in "FU"
        if is_last and self.capacity_bytes is None:
            self.allocator.empty_cache()

    on_U = on_F

    def on_O(self, address, size_bytes, stream):
        try:
            self.allocator.allocate(size_bytes, stream)
        except OutOfMemoryError:
            return
        self.agreement.same("out of memory", False, True, self.index)

    def compare(self, code):
        if code in "arfO":
            self.agreement.same(
                "reserved", self.allocator.reserved_bytes, self.reserved, self.index
            )
        if self.index in self.reported:
            now = (self.allocator.allocated_bytes, self.allocator.reserved_bytes)
            self.agreement.same(
                "allocated and reserved", now, self.reported[self.index], self.index
            )


def reported(figures):
    """Allocated and reserved bytes by event; each row is the difference to the one before."""
    rows, last = {}, [0, 0, 0]
    for row in figures:
        last = [a + b for a, b in zip(last, row, strict=True)]
        rows[last[0]] = (last[1], last[2])
    return rows
