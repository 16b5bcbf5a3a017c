"""The simulated allocator: its invariants, an obviously correct one beside it, its errors."""

from contextlib import suppress
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_allocator import PlainAllocator
from running_allocator import RunningAllocator

from memcallback.core.allocation_trace import GRAPH_POOL
from memcallback.core.units import KiB, MiB
from memcallback.prediction.allocator.caching import CachingAllocator, OutOfMemoryError
from memcallback.prediction.allocator.settings import AllocatorSettings

sizes = st.one_of(
    st.integers(1, 5000),
    st.integers(1, 3 * MiB),
    st.integers(1, 45 * MiB),
    st.sampled_from((512, MiB, 20 * MiB)),
)
requests = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), sizes, st.integers(0, 1)),
        st.tuples(
            st.sampled_from(("free", "request_free", "complete_free")),
            st.integers(0, 1000),
            st.just(0),
        ),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=60,
)
capacities = st.sampled_from((None, None, 64 * MiB, 150 * MiB))
settings_of_segments = st.sampled_from(
    (
        AllocatorSettings(),
        AllocatorSettings(max_split_bytes=20 * MiB),
        AllocatorSettings(max_split_bytes=24 * MiB, large_segment_bytes=12 * MiB),
        AllocatorSettings(roundup_power2_divisions=(4,) * 16),
    )
)
all_settings = settings_of_segments | st.sampled_from(
    (
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings(expandable_segments=True, large_segment_bytes=12 * MiB),
    )
)


class Driver:
    """Puts requests to an allocator; a number chooses among the blocks that a request can mean."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.allocated = []
        self.pending = []

    def request(self, kind, number, stream):
        if kind == "allocate":
            with suppress(OutOfMemoryError):
                self.allocated.append(self.allocator.allocate(number, stream))
        elif kind == "empty_cache":
            self.allocator.empty_cache()
        elif kind == "complete_free":
            if self.pending:
                self.allocator.complete_free(self.pending.pop(number % len(self.pending)))
        elif self.allocated:
            block = self.allocated.pop(number % len(self.allocated))
            getattr(self.allocator, kind)(block)
            if kind == "request_free":
                self.pending.append(block)
        # An emptied cache, or the same inside a retry, has completed them.
        self.pending = [
            block for block in self.pending if block.requested_bytes and not block.is_allocated
        ]

    def free_all(self):
        for block in self.allocated:
            self.allocator.free(block)
        self.allocator.empty_cache()


def figures(allocator):
    names = ("requested", "allocated", "active", "inactive_split", "reserved")
    return {name: getattr(allocator, f"{name}_bytes") for name in names} | {
        "segments": allocator.num_segments
    }


@given(requests, capacities, all_settings)
def test_blocks_tile_their_segments_and_the_figures_are_ordered(events, capacity_bytes, settings):
    driver = Driver(RunningAllocator(settings, capacity_bytes=capacity_bytes))
    allocator = driver.allocator
    for event in events:
        driver.request(*event)
        now = figures(allocator)
        assert 0 <= now["requested"] <= now["active"]
        assert 0 <= now["allocated"] <= now["active"] <= now["reserved"]
        assert 0 <= now["inactive_split"] <= now["reserved"] - now["active"]
        assert now["reserved"] == sum(
            block.size_bytes for segment in allocator.snapshot() for block in segment
        )
        assert capacity_bytes is None or now["reserved"] <= capacity_bytes
        for segment in allocator.snapshot():
            assert segment[0].is_mapped
            for before, after in pairwise(segment):
                assert before.address + before.size_bytes == after.address
                assert before.requested_bytes or after.requested_bytes
    driver.free_all()
    assert figures(allocator) == dict.fromkeys(figures(allocator), 0)
    assert allocator.snapshot() == []


@given(requests, capacities, settings_of_segments)
def test_an_obviously_correct_allocator_agrees_event_by_event(events, capacity_bytes, settings):
    driver = Driver(RunningAllocator(settings, capacity_bytes=capacity_bytes))
    plain = Driver(PlainAllocator(settings, capacity_bytes))
    for event in events:
        driver.request(*event)
        plain.request(*event)
        assert [block.address for block in driver.allocated] == [
            block.address for block in plain.allocated
        ]
        assert figures(driver.allocator) == plain.allocator.figures()
        assert driver.allocator.num_alloc_retries == plain.allocator.num_alloc_retries
        assert driver.allocator.num_ooms == plain.allocator.num_ooms


@pytest.mark.parametrize(
    "settings",
    [
        AllocatorSettings(),
        AllocatorSettings(max_split_bytes=20 * MiB),
        AllocatorSettings(max_split_bytes=24 * MiB, large_segment_bytes=12 * MiB),
        AllocatorSettings(roundup_power2_divisions=(4,) * 16),
    ],
)
def test_they_agree_over_a_long_time_on_a_full_device(settings):
    random = Random(1234)
    driver = Driver(RunningAllocator(settings, capacity_bytes=300 * MiB))
    plain = Driver(PlainAllocator(settings, 300 * MiB))
    for _ in range(1500):
        kind = random.choice(("allocate",) * 10 + ("free",) * 6 + ("request_free", "complete_free"))
        number = int(2 ** random.uniform(0, 26)) if kind == "allocate" else random.randrange(1000)
        stream = random.randrange(2)
        driver.request(kind, number, stream)
        plain.request(kind, number, stream)
        assert [block.address for block in driver.allocated] == [
            block.address for block in plain.allocated
        ]
        assert figures(driver.allocator) == plain.allocator.figures()
    assert (
        driver.allocator.num_alloc_retries
        == plain.allocator.num_alloc_retries
        > driver.allocator.num_ooms
        > 0
    )
    assert driver.allocator.num_ooms == plain.allocator.num_ooms


@given(requests, all_settings)
def test_a_peak_is_the_largest_figure_so_far(events, settings):
    driver = Driver(RunningAllocator(settings, capacity_bytes=100 * MiB))
    largest_allocated = largest_reserved = 0
    for event in events:
        driver.request(*event)
        stats = driver.allocator.stats()
        largest_allocated = max(largest_allocated, stats.allocated_bytes)
        largest_reserved = max(largest_reserved, stats.reserved_bytes)
        assert stats.peak_allocated_bytes == largest_allocated
        assert stats.peak_reserved_bytes >= largest_reserved


@given(requests, settings_of_segments)
def test_without_expandable_segments_no_peak_of_reserved_memory_is_between_requests(
    events, settings
):
    driver = Driver(RunningAllocator(settings, capacity_bytes=100 * MiB))
    largest_reserved = 0
    for event in events:
        driver.request(*event)
        largest_reserved = max(largest_reserved, driver.allocator.reserved_bytes)
        assert driver.allocator.stats().peak_reserved_bytes == largest_reserved


@pytest.mark.parametrize("is_expandable", [False, True])
def test_the_peak_of_reserved_memory_begins_anew_at_what_is_reserved(is_expandable):
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=is_expandable))
    kept = allocator.allocate(40 * MiB)
    allocator.free(allocator.allocate(60 * MiB))
    allocator.empty_cache()
    assert allocator.stats().peak_reserved_bytes == 100 * MiB
    allocator.reset_peaks()
    assert allocator.stats().peak_reserved_bytes == 40 * MiB
    allocator.allocate(20 * MiB)
    assert allocator.stats().peak_reserved_bytes == 60 * MiB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.stats().peak_reserved_bytes == 60 * MiB
    assert allocator.stats().reserved_bytes == 20 * MiB


def test_peaks_begin_anew_when_reset():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(3 * MiB))
    assert allocator.stats().peak_allocated_bytes == 3 * MiB
    allocator.reset_peaks()
    assert allocator.stats().peak_allocated_bytes == 0
    assert allocator.stats().peak_reserved_bytes == 20 * MiB


def test_a_tail_of_up_to_a_mebibyte_stays_in_a_large_block():
    allocator = CachingAllocator()
    assert allocator.allocate(19 * MiB).size_bytes == 20 * MiB
    assert allocator.allocate(19 * MiB - 512).size_bytes == 19 * MiB - 512
    assert allocator.stats().requested_bytes == 38 * MiB - 512
    assert allocator.stats().inactive_split_bytes == 1 * MiB + 512


def test_a_block_of_the_split_limit_is_not_split_and_serves_only_its_like():
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=32 * MiB))
    allocator.free(allocator.allocate(36 * MiB))
    assert allocator.allocate(32 * MiB).size_bytes == 36 * MiB
    allocator.free(allocator.allocate(36 * MiB))
    allocator.allocate(32 * MiB - 512)
    assert allocator.stats().reserved_bytes == (36 + 36 + 32) * MiB


def test_a_stream_does_not_get_what_another_has_freed():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(4 * MiB, stream=1))
    allocator.allocate(4 * MiB, stream=2)
    assert allocator.stats().reserved_bytes == 40 * MiB


def test_the_pool_of_cuda_graphs_keeps_its_segments():
    allocator = CachingAllocator()
    for stream in (0, GRAPH_POOL):
        allocator.free(allocator.allocate(4 * MiB, stream))
    allocator.empty_cache()
    assert [blocks[0].stream for blocks in allocator.snapshot()] == [GRAPH_POOL]
    allocator.allocate(4 * MiB, GRAPH_POOL)
    assert allocator.stats().reserved_bytes == 20 * MiB


def test_memory_in_use_by_another_stream_is_active_and_not_allocated():
    allocator = RunningAllocator()
    block = allocator.allocate(4096)
    allocator.request_free(block)
    stats = allocator.stats()
    assert (stats.allocated_bytes, stats.active_bytes, stats.requested_bytes) == (0, 4096, 4096)
    assert allocator.allocate(4096).address != block.address
    allocator.empty_cache()
    assert allocator.stats().active_bytes == 4096


def test_expandable_segments_grow_by_pages_and_leave_no_slivers():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    first = allocator.allocate(30 * MiB)
    allocator.allocate(10 * MiB)
    assert allocator.stats().reserved_bytes == 40 * MiB
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.stats().reserved_bytes == 20 * MiB
    assert allocator.allocate(20 * MiB).address == first.address


def test_without_a_capacity_an_expandable_segment_grows_to_any_size():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    for _ in range(2):
        allocator.allocate(200_000 * 20 * MiB)
    assert allocator.stats().reserved_bytes == 400_000 * 20 * MiB


def test_a_full_device_is_asked_again_after_the_cache_is_given_back():
    allocator = CachingAllocator(capacity_bytes=50 * MiB)
    allocator.free(allocator.allocate(30 * MiB))
    allocator.allocate(40 * MiB)
    stats = allocator.stats()
    assert (stats.num_alloc_retries, stats.num_ooms, stats.reserved_bytes) == (1, 0, 40 * MiB)


def test_a_device_without_memory_refuses_every_request():
    allocator = CachingAllocator(capacity_bytes=0)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate(1)
    assert str(caught.value) == (
        "Tried to allocate 2.00 MiB of a capacity of 0 bytes, of which 0 bytes is free. 0 bytes is "
        "allocated, and 0 bytes is reserved but unallocated."
    )


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_just_enough_oversize_blocks_are_given_back_without_a_retry(num_blocks):
    settings = AllocatorSettings(max_split_bytes=20 * MiB)
    allocator = CachingAllocator(settings, capacity_bytes=num_blocks * 32 * MiB)
    for block in [allocator.allocate(32 * MiB) for _ in range(num_blocks)]:
        allocator.free(block)
    allocator.allocate(64 * MiB)
    assert allocator.num_alloc_retries == 0
    assert allocator.reserved_bytes == num_blocks * 32 * MiB


def test_a_request_too_large_is_refused_with_the_state_and_the_allocator_goes_on():
    allocator = CachingAllocator(capacity_bytes=50 * MiB)
    allocator.allocate(30 * MiB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate(25 * MiB - 1)
    assert str(caught.value) == (
        "Tried to allocate 26.00 MiB of a capacity of 50.00 MiB, of which 20.00 MiB is free. 30.00 "
        "MiB is allocated, and 0 bytes is reserved but unallocated."
    )
    assert caught.value.requested_bytes == 25 * MiB - 1
    assert caught.value.capacity_bytes == 50 * MiB
    assert (caught.value.stats.num_alloc_retries, caught.value.stats.num_ooms) == (1, 1)
    assert allocator.allocate(20 * MiB).size_bytes == 20 * MiB


def test_a_segment_of_a_running_program_is_taken_over():
    allocator = RunningAllocator()
    first, second = allocator.adopt_segment(
        0x1000,
        20 * MiB,
        0,
        is_small=False,
        blocks=[(0x1000, 5, 512), (0x1000 + 2 * MiB, 4096, 4096)],
    )
    assert allocator.stats().allocated_bytes == 4608
    assert allocator.stats().inactive_split_bytes == 20 * MiB - 4608
    allocator.free(first)
    allocator.free(second)
    assert (allocator.stats().inactive_split_bytes, allocator.num_segments) == (0, 1)


def test_a_free_part_of_a_large_segment_that_was_taken_over_is_not_given_back():
    allocator = RunningAllocator(
        AllocatorSettings(max_split_bytes=20 * MiB), capacity_bytes=80 * MiB
    )
    allocator.adopt_segment(0, 60 * MiB, 0, is_small=False, blocks=[(0, 5, 512)])
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(30 * MiB)
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (60 * MiB, 1)


def refused(action):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the callers compare the text
        action()
    return str(caught.value)


def test_what_cannot_be_done_is_refused_with_a_way_out():
    allocator = RunningAllocator(capacity_bytes=64 * MiB)
    block = allocator.allocate(KiB)
    allocator.free(block)
    assert refused(lambda: allocator.allocate(0)) == (
        "size_bytes is 0; an allocation has at least 1 byte: leave empty tensors out"
    )
    assert (
        "is not allocated; a block is freed once, after it was allocated: leave this free out"
        in refused(lambda: allocator.free(block))
    )
    assert "awaits no end of its use; call request_free before complete_free" in refused(
        lambda: allocator.complete_free(block)
    )
    assert "capacity_bytes is -1; a capacity is 0 or more bytes" in refused(
        lambda: RunningAllocator(capacity_bytes=-1)
    )


@pytest.mark.parametrize(
    ("size_bytes", "blocks", "message"),
    [
        (
            2 * MiB,
            [(0x1200, 1, 512), (0x1200, 1, 512)],
            "the block at 4608 asks for 1 of 512 bytes after an end at 5120",
        ),
        (2 * MiB, [(0x1000, 513, 512)], "the block at 4096 asks for 513 of 512 bytes"),
        (
            2 * MiB,
            [(0x1000, 3 * MiB, 3 * MiB)],
            "the blocks of the segment at 4096 end at 3149824; it ends at 2101248",
        ),
        (
            80 * MiB,
            [],
            "the segment at 4096 of 83886080 bytes is more than capacity_bytes has left",
        ),
    ],
)
def test_a_segment_that_cannot_be_is_not_taken_over(size_bytes, blocks, message):
    allocator = RunningAllocator(capacity_bytes=64 * MiB)
    assert message in refused(
        lambda: allocator.adopt_segment(0x1000, size_bytes, 0, is_small=True, blocks=blocks)
    )
    assert allocator.snapshot() == []


def test_an_expandable_segment_is_not_taken_over():
    allocator = RunningAllocator(AllocatorSettings(expandable_segments=True))
    assert "a simulation of them starts empty" in refused(
        lambda: allocator.adopt_segment(0x1000, 2 * MiB, 0, is_small=True)
    )
