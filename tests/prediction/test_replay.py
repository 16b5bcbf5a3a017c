"""A replay of a few events, whose figures a reader can add up."""

import pytest

from memcallback.core.allocation_trace import (
    Alloc,
    EmptyCache,
    Fallback,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.types import Category, Phase, Stage
from memcallback.core.units import MiB
from memcallback.devices.catalogue import HostSpec, find_device
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.allocator.host import HostAllocator
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.replay import replay, replay_on
from memcallback.prediction.replayed import live_at

FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP


def phase(kind, *events, covers=()):
    return [PhaseStart(kind, covers), *events, PhaseEnd(kind)]


def step(*parts, stage=Stage.TRAINING):
    return [StepStart(stage), *(event for part in parts for event in part), StepEnd()]


def on_host(events, **options):
    return replay(events, HostAllocator(**options))


def test_a_phase_has_what_is_held_at_its_ends_and_its_peak():
    events = [
        Alloc(0, 100, category=Category.PARAMETER),
        *step(
            phase(FORWARD, Alloc(1, 50), Alloc(2, 30), Free(1)),
            [Alloc(3, 7)],
            phase(BACKWARD, Free(2), Alloc(4, 10, category=Category.GRADIENT)),
        ),
    ]
    (replayed,) = on_host(events).steps
    forward, backward = replayed.windows
    assert (forward.start.allocated_bytes, forward.end.allocated_bytes) == (100, 130)
    assert forward.peak_allocated_bytes == 180
    assert (backward.start.allocated_bytes, backward.end.allocated_bytes) == (137, 117)
    assert backward.peak_allocated_bytes == 137
    assert forward.start.by_category[Category.PARAMETER] == 100
    assert backward.end.by_category[Category.GRADIENT] == 10
    assert backward.start.by_category[Category.GRADIENT] == 0
    assert forward.num_alloc_retries is None


def test_what_a_category_holds_goes_with_its_storage():
    events = step(
        phase(FORWARD, Alloc(1, 50, category=Category.INPUT), Alloc(2, 5), Free(1), Free(2))
    )
    (replayed,) = on_host(events).steps
    assert replayed.windows[0].end.by_category[Category.INPUT] == 0
    assert replayed.windows[0].end.allocated_bytes == 0


def test_of_equal_peaks_the_first_is_the_one_that_is_shown():
    events = step(
        phase(FORWARD, Alloc(1, 100), Free(1), Alloc(2, 100), Free(2), Alloc(3, 99)),
        phase(BACKWARD, Alloc(4, 1)),
    )
    (replayed,) = on_host(events).steps
    # StepStart and PhaseStart are events 0 and 1.
    assert replayed.peak_position == 2


def test_a_peak_at_the_start_of_a_phase_is_that_of_the_event_that_begins_it():
    events = [Alloc(0, 500), *step(phase(FORWARD, Free(0), Alloc(1, 100)))]
    (replayed,) = on_host(events).steps
    assert replayed.peak_position == 2
    assert replayed.windows[0].peak_allocated_bytes == 500


def test_memory_between_phases_is_no_peak_of_the_step():
    events = step(
        phase(FORWARD, Alloc(1, 10)), [Alloc(2, 900), Free(2)], phase(BACKWARD, Alloc(3, 5))
    )
    (replayed,) = on_host(events).steps
    assert [window.peak_allocated_bytes for window in replayed.windows] == [10, 15]
    assert replayed.peak_position == events.index(Alloc(3, 5))


def test_a_step_without_phases_has_no_peak():
    (replayed,) = on_host(step([Alloc(1, 10)])).steps
    assert replayed.windows == ()
    assert replayed.peak_position == -1


def test_steps_before_the_first_update_are_warm_ups():
    update = phase(UPDATE)
    events = [*step(phase(FORWARD)), *step(phase(FORWARD), update), *step(phase(FORWARD), update)]
    assert [one.is_warm_up for one in on_host(events).steps] == [True, True, False]


def test_of_a_forward_pass_alone_the_first_of_each_run_is_a_warm_up():
    validation = step(phase(FORWARD), stage=Stage.VALIDATION)
    events = [*step(phase(FORWARD), phase(UPDATE)), *validation, *validation, *validation]
    steps = on_host(events).steps
    assert [one.stage for one in steps] == [Stage.TRAINING, *[Stage.VALIDATION] * 3]
    assert [one.is_warm_up for one in steps] == [True, True, False, False]


def test_a_window_covers_the_phases_that_its_mark_names():
    events = step(phase(BACKWARD, covers=(FORWARD, BACKWARD)), phase(UPDATE))
    (replayed,) = on_host(events).steps
    assert [window.covers for window in replayed.windows] == [(FORWARD, BACKWARD), (UPDATE,)]


def test_an_empty_allocation_and_a_free_of_nothing_change_nothing():
    result = on_host(step(phase(FORWARD, Alloc(1, 0), Free(1), Free(77), Alloc(2, 8))))
    assert result.block_bytes == {2: 8}
    assert result.steps[0].windows[0].peak_allocated_bytes == 8


def test_blocks_have_the_size_that_the_allocator_gives_them():
    events = step(phase(FORWARD, Alloc(1, 100, stream=1), Alloc(2, 3 * MiB)))
    result = replay(events, CachingAllocator())
    assert result.block_bytes == {1: 512, 2: 3 * MiB}


@pytest.mark.parametrize(
    ("stage", "name"), [(Stage.TRAINING, "step"), (Stage.VALIDATION, "validation step")]
)
def test_what_failed_is_told_with_its_step_phase_operator_and_module(stage, name):
    events = [
        *step(phase(FORWARD, Alloc(1, 10)), stage=stage),
        *step(phase(BACKWARD, Alloc(2, 100, operator="aten::mm", module="net.head")), stage=stage),
    ]
    result = on_host(events, capacity_bytes=64)
    assert result.out_of_memory == (
        f"{name} 2, backward, aten::mm in module 'net.head': Tried to allocate 100 bytes of a "
        "capacity of 64 bytes, of which 54 bytes is free. 10 bytes is allocated, and 0 bytes is "
        "reserved but unallocated."
    )
    assert len(result.steps) == 1


def test_what_failed_before_any_step_and_outside_of_modules_is_told_too():
    result = on_host([Alloc(1, 100)], capacity_bytes=64)
    assert result.out_of_memory.startswith("step 1, an allocation in the root module: Tried to")
    assert result.steps == []


def test_the_cache_is_emptied_where_the_trace_says_so():
    events = step(
        phase(FORWARD, Alloc(1, 4 * MiB), Free(1), EmptyCache(), Alloc(2, 3 * MiB)),
        phase(UPDATE, Free(2)),
    )
    (replayed,) = replay(events, CachingAllocator()).steps
    assert [window.end.reserved_bytes for window in replayed.windows] == [20 * MiB, 20 * MiB]
    assert on_host(events).steps[0].windows[0].end.allocated_bytes == 3 * MiB


def test_steps_are_counted_for_each_stage():
    events = [
        *step(phase(FORWARD)),
        *step(phase(FORWARD), stage=Stage.VALIDATION),
        *step(phase(FORWARD, Alloc(1, 100)), stage=Stage.VALIDATION),
    ]
    assert on_host(events, capacity_bytes=64).out_of_memory.startswith("validation step 2, forward")


def test_retries_are_counted_in_their_phase_and_not_at_all_with_unlimited_memory():
    first, second = Alloc(1, 30 * MiB), Alloc(2, 40 * MiB)
    events = step(phase(FORWARD, first, Free(1)), phase(BACKWARD, second))
    limited = replay(events, CachingAllocator(capacity_bytes=50 * MiB))
    forward, backward = limited.steps[0].windows
    assert (forward.num_alloc_retries, backward.num_alloc_retries) == (0, 1)
    assert (backward.num_ooms, limited.num_alloc_retries) == (0, 1)
    unlimited = replay(events, CachingAllocator(), unlimited=True)
    assert {window.num_alloc_retries for window in unlimited.steps[0].windows} == {None}
    assert {window.num_ooms for window in unlimited.steps[0].windows} == {None}


def test_a_device_without_a_caching_allocator_is_replayed_without_one():
    events = step(phase(FORWARD, Alloc(1, 100)))
    card = find_device("T4")
    on_card = replay_on(events, card, AllocatorSettings(), None)
    assert on_card.steps[0].windows[0].peak_reserved_bytes == 2 * MiB
    host = find_device("cpu")
    assert isinstance(host, HostSpec)
    window = replay_on(events, host, AllocatorSettings(), None).steps[0].windows[0]
    assert (window.peak_allocated_bytes, window.peak_reserved_bytes) == (100, None)
    assert replay_on(events, host, AllocatorSettings(), 99).out_of_memory is not None
    assert replay_on(events, card, AllocatorSettings(), MiB).out_of_memory is not None
    assert replay_on(events, card, AllocatorSettings(), 2 * MiB).out_of_memory is None


def test_what_is_live_at_an_event_is_listed_the_largest_first():
    first, second, empty, third = Alloc(1, 10), Alloc(2, 100), Alloc(3, 0), Alloc(4, 50)
    events = [first, second, empty, third, Free(2)]
    sizes = {1: 512, 2: 1024, 4: 600}
    assert [item.alloc for item in live_at(3, events, sizes)] == [second, third, first]
    assert [item.block_bytes for item in live_at(4, events, sizes)] == [600, 512]
    assert [item.alloc for item in live_at(0, events, sizes)] == [first]


def same(*sizes):
    return sizes


def workspace(number, size_mib, *others):
    """A convolution's workspace, and those of the plans after it, in MiB."""
    sizes = tuple(size * MiB for size in (size_mib, *others))
    fallback = Fallback(same, sizes)
    return Alloc(
        number, sizes[0], category=Category.WORKSPACE, operator="aten::conv", fallback=fallback
    )


def on_card(events, capacity_mib):
    return replay(events, CachingAllocator(capacity_bytes=capacity_mib * MiB))


def test_a_workspace_that_does_not_fit_gives_way_to_that_of_the_next_plan():
    held = Alloc(0, 40 * MiB)
    events = [held, *step(phase(FORWARD, workspace(1, 64, 32, 12, 0), Free(1)))]
    result = on_card(events, 60)
    assert result.out_of_memory is None
    assert result.block_bytes[1] == 12 * MiB
    # The first plan and the second failed, each after the cache was released.
    assert result.num_alloc_retries == 2
    assert on_card(events, 200).block_bytes[1] == 64 * MiB


def test_a_plan_without_a_workspace_needs_no_room():
    events = [Alloc(0, 40 * MiB), *step(phase(FORWARD, workspace(1, 64, 0), Free(1)))]
    result = on_card(events, 40)
    assert result.out_of_memory is None
    assert result.block_bytes[1] == 0
    assert result.steps[0].windows[0].peak_allocated_bytes == 40 * MiB


def test_the_first_other_plan_is_tried_if_it_is_not_the_one_that_failed():
    failing = workspace(1, 64)
    others = failing._replace(fallback=Fallback(same, (16 * MiB, 12 * MiB)))
    events = [Alloc(0, 40 * MiB), *step(phase(FORWARD, others, Free(1)))]
    assert on_card(events, 60).block_bytes[1] == 16 * MiB


def test_the_plan_that_ran_is_kept_for_its_problem_in_its_thread():
    first, again, elsewhere = (workspace(number, 64, 12) for number in (2, 4, 6))
    other = workspace(8, 66, 12)
    events = [
        Alloc(0, 20 * MiB),
        *step(
            phase(FORWARD, Alloc(1, 40 * MiB), first, Free(2), Free(1), again, Free(4), other),
            phase(BACKWARD, Free(8), elsewhere),
        ),
    ]
    sizes = on_card(events, 90).block_bytes
    assert [sizes[number] // MiB for number in (2, 4, 8, 6)] == [12, 12, 66, 64]


def test_where_a_kept_plan_fails_all_are_tried_anew():
    events = [
        *step(
            phase(
                FORWARD,
                Alloc(1, 50 * MiB),
                workspace(2, 64, 30, 12),
                Free(2),
                Alloc(3, 30 * MiB),
                workspace(4, 64, 30, 12),
                Free(4),
            )
        )
    ]
    result = on_card(events, 92)
    assert [result.block_bytes[number] // MiB for number in (2, 4)] == [30, 12]
    # 64; then the kept 30, 64 and 30 again.
    assert result.num_alloc_retries == 4


def test_memory_runs_out_where_no_plan_fits():
    events = [Alloc(0, 40 * MiB), *step(phase(FORWARD, workspace(1, 64, 32), Free(1)))]
    result = on_card(events, 60)
    assert result.out_of_memory.startswith("step 1, forward, aten::conv in the root module: Tried")
    assert "64.00 MiB" in result.out_of_memory
    assert result.steps == []
