"""Segments lie where NVIDIA's driver puts them: the rules, held against a real H100."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from allocator_history import load

from memcallback.core.units import GiB, MiB
from memcallback.prediction.allocator.addresses import Addresses

RECORDED = Path(__file__).parents[1] / "recorded" / "allocator_h100"
RANGE_BYTES = 32 * MiB


class Ranges:
    """The ranges of addresses that a recorded driver has reserved, each with its segments."""

    def __init__(self):
        self.found = []  # [start, end, {address: size}], the newest last

    def rooms(self, size_bytes):
        """Where a segment would fit, as (place of the range in `found`, address)."""
        found = []
        for place, (start, end, segments) in enumerate(self.found):
            free = start
            for address, segment_bytes in [*sorted(segments.items()), (end, 0)]:
                if address - free >= size_bytes:
                    found.append((place, free))
                free = address + segment_bytes
        return found

    def add(self, address, size_bytes):
        for start, end, segments in self.found:
            if start <= address and address + size_bytes <= end:
                segments[address] = size_bytes
                return
        start = address // RANGE_BYTES * RANGE_BYTES
        end = -(-(address + size_bytes) // RANGE_BYTES) * RANGE_BYTES
        self.found.append((start, end, {address: size_bytes}))

    def remove(self, address):
        for _, _, segments in self.found:
            segments.pop(address, None)
        self.found = [one for one in self.found if one[2]]


def choices(name):
    """How often the driver did what the rules say."""
    ranges, counts = Ranges(), Counter()
    for code, address, size_bytes, _ in load(RECORDED / f"{name}.json.gz")["events"]:
        if code == "F":
            ranges.remove(address)
        if code != "S":
            continue
        rooms = ranges.rooms(size_bytes)
        if any(start <= address < end for start, end, _ in ranges.found):
            if len(rooms) > 1:
                counts["several ranges"] += 1
                counts["the newest"] += max(rooms)[0] == next(
                    place
                    for place, (start, end, _) in enumerate(ranges.found)
                    if start <= address < end
                )
        elif address % RANGE_BYTES == 0:
            counts["new ranges"] += 1
            counts["though another has room"] += bool(rooms)
        ranges.add(address, size_bytes)
    return counts


def test_on_an_h100_a_segment_lies_in_the_newest_range_with_room_or_else_in_a_new_one():
    # Tensors of all sizes, without kernels, whose code would lie in ranges too.
    counts = sum(
        (choices(f"mixed-uint8-{setting}") for setting in ("default", "max-split", "roundup")),
        Counter(),
    )
    assert counts == {"several ranges": 69, "the newest": 69, "new ranges": 109}


def test_each_new_range_lies_below_and_what_is_left_of_the_newest_is_used_first():
    addresses = Addresses()
    first = addresses.new(GiB)
    of_kernels = [addresses.new(100 * MiB) for _ in range(3)]
    assert [after - before for before, after in pairwise(of_kernels)] == [100 * MiB] * 2
    # The range of kernels has 84 MiB left, so a larger segment gets a range of 128 MiB.
    large = addresses.new(100 * MiB)
    assert large < of_kernels[0] < first
    assert addresses.new(26 * MiB) == large + 100 * MiB
    assert addresses.new(2 * MiB) == large + 126 * MiB
    assert addresses.new(2 * MiB) == of_kernels[-1] + 100 * MiB
    newest = addresses.new(96 * MiB)
    assert newest == large - 96 * MiB
    assert addresses.new(20 * MiB) == of_kernels[-1] + 102 * MiB


@pytest.mark.parametrize("size_bytes", [1, 2 * MiB - 1, 2 * MiB])
def test_addresses_are_multiples_of_two_mebibytes(size_bytes):
    addresses = Addresses()
    for _ in range(40):
        assert addresses.new(size_bytes) % (2 * MiB) == 0


def test_segments_do_not_overlap():
    addresses, found = Addresses(), []
    for number in range(500):
        size_bytes = (2 + number * 37 % 120) * MiB
        found.append((addresses.new(size_bytes), size_bytes))
    for (address, size_bytes), (after, _) in pairwise(sorted(found)):
        assert address + size_bytes <= after


def test_segments_that_there_are_keep_their_order_and_new_ones_lie_below():
    addresses = Addresses()
    known = [addresses.known(size * MiB) for size in (20, 2, 3, 100)]
    assert known == sorted(known)
    assert [after - before for before, after in pairwise(known)] == [20 * MiB, 2 * MiB, 4 * MiB]
    new = addresses.new(64 * MiB)
    assert new == known[0] - 64 * MiB
    assert addresses.new(64 * MiB) == new - 64 * MiB
