"""A CPU's memory: what was asked for, without rounding and without a cache."""

import pytest

from memcallback.core.units import MiB
from memcallback.prediction.allocator.caching import OutOfMemoryError
from memcallback.prediction.allocator.host import HostAllocator


def test_what_is_allocated_is_what_was_asked_for_and_goes_at_once():
    allocator = HostAllocator()
    first, second = allocator.allocate(100), allocator.allocate(23, 7)
    assert (first.size_bytes, second.size_bytes) == (100, 23)
    assert allocator.allocated_bytes == 123
    allocator.free(first)
    assert allocator.allocated_bytes == 23
    stats = allocator.stats()
    assert (stats.allocated_bytes, stats.requested_bytes, stats.peak_allocated_bytes) == (
        23,
        23,
        123,
    )
    assert stats.reserved_bytes is None
    assert allocator.num_alloc_retries == 0


def test_the_peak_begins_anew_when_reset():
    allocator = HostAllocator()
    block = allocator.allocate(100)
    allocator.free(block)
    allocator.allocate(7)
    allocator.reset_peaks()
    assert allocator.stats().peak_allocated_bytes == 7
    allocator.allocate(1)
    assert allocator.stats().peak_allocated_bytes == 8


def test_a_full_host_refuses_and_says_how_much_is_free():
    allocator = HostAllocator(capacity_bytes=3 * MiB)
    allocator.allocate(2 * MiB)
    allocator.allocate(MiB)
    with pytest.raises(OutOfMemoryError) as failed:
        allocator.allocate(1)
    assert str(failed.value) == (
        "Tried to allocate 1 bytes of a capacity of 3.00 MiB, of which 0 bytes is free. 3.00 MiB "
        "is allocated, and 0 bytes is reserved but unallocated."
    )
    assert (failed.value.requested_bytes, failed.value.capacity_bytes) == (1, 3 * MiB)
    assert failed.value.stats.allocated_bytes == allocator.allocated_bytes == 3 * MiB
