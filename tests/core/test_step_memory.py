from dataclasses import replace

import pytest

from memcallback.core.step_memory import (
    DeviceMemory,
    MemoryStats,
    PhaseMemory,
    StepMemory,
    error_pct,
    larger,
    largest,
    total,
)
from memcallback.core.types import Category, Kind, Phase


def window(phase, peak, *, covers=None, retries=0, start=None, end=None):
    return PhaseMemory(
        phase=phase,
        covers=covers or (phase,),
        start=start or MemoryStats(allocated_bytes=100),
        end=end or MemoryStats(allocated_bytes=200),
        peak_allocated_bytes=peak,
        num_alloc_retries=retries,
        num_ooms=0,
    )


def step(*windows):
    return StepMemory(kind=Kind.MEASURED, source="a test", device_name="CPU", windows=windows)


def test_windows_of_one_phase_merge_from_the_first_start_to_the_last_end():
    first = window(
        Phase.FORWARD,
        1234,
        start=MemoryStats(allocated_bytes=1),
        end=MemoryStats(allocated_bytes=2),
        retries=1,
    )
    between = window(Phase.BACKWARD, 4096)
    second = window(
        Phase.FORWARD,
        1000,
        start=MemoryStats(allocated_bytes=3),
        end=MemoryStats(allocated_bytes=4),
        retries=2,
    )
    phases = step(first, between, second).phases
    assert list(phases) == [Phase.FORWARD, Phase.BACKWARD]
    forward = phases[Phase.FORWARD]
    assert (forward.start.allocated_bytes, forward.end.allocated_bytes) == (1, 4)
    assert forward.peak_allocated_bytes == 1234
    assert forward.num_alloc_retries == 3


def test_a_step_peaks_where_its_largest_window_does():
    recorded = step(
        window(Phase.FORWARD, 1234), window(Phase.BACKWARD, 4096), window(Phase.OPTIMIZER_STEP, 512)
    )
    assert recorded.peak_allocated_bytes == 4096


def test_an_unknown_figure_stays_unknown_and_is_not_zero():
    recorded = step(window(Phase.FORWARD, None))
    assert recorded.peak_allocated_bytes is None
    assert recorded.peak_reserved_bytes is None
    assert recorded.held_bytes is None
    assert largest([None, 3, None]) == 3
    assert largest([]) is None
    assert total([1, None]) is None
    assert total([1, 2]) == 3


def test_a_window_that_covers_two_phases_says_both():
    both = window(Phase.BACKWARD, 10, covers=(Phase.FORWARD, Phase.BACKWARD))
    assert both.label == "forward + backward"


def test_the_rest_is_what_nobody_holds_and_never_negative():
    split = {Category.PARAMETER: 300, Category.INPUT: 100}
    assert MemoryStats(allocated_bytes=1000, by_category=split).rest_bytes == 600
    assert MemoryStats(allocated_bytes=350, by_category=split).rest_bytes == 0
    assert MemoryStats(allocated_bytes=1000).rest_bytes is None


def test_what_is_held_at_least_and_at_most_leaves_the_input_out():
    start = MemoryStats(
        by_category={Category.PARAMETER: 100, Category.GRADIENT: 0, Category.INPUT: 7}
    )
    end = MemoryStats(
        by_category={Category.PARAMETER: 100, Category.GRADIENT: 100, Category.INPUT: 7}
    )
    recorded = step(window(Phase.BACKWARD, 1, start=start, end=end))
    assert (recorded.always_held_bytes, recorded.held_bytes) == (100, 200)


@pytest.mark.parametrize(
    ("predicted", "measured", "error"),
    [(110, 100, 10.0), (50, 100, -50.0), (None, 100, None), (5, None, None), (5, 0, None)],
)
def test_the_error_is_signed_and_relative_to_what_was_measured(predicted, measured, error):
    assert error_pct(predicted, measured) == error


def test_the_larger_step_is_the_one_that_allocates_more_whatever_the_process_holds():
    def of(allocated, resident):
        recorded = window(Phase.FORWARD, allocated)
        return step(replace(recorded, peak_resident_bytes=resident))

    assert larger(of(4096, 10_000), of(1234, 99_999)) == of(4096, 10_000)
    assert larger(of(None, 99_999), of(1234, 10_000)) == of(1234, 10_000)
    assert larger(of(None, 99_999), of(None, 10_000)) == of(None, 99_999)


def test_non_pytorch_memory_is_what_is_used_beyond_reserved():
    assert DeviceMemory(used_bytes=1000, reserved_bytes=600).non_pytorch_bytes == 400
    assert DeviceMemory(used_bytes=1000, reserved_bytes=1200).non_pytorch_bytes == 0
    assert DeviceMemory(used_bytes=1000).non_pytorch_bytes is None
    assert DeviceMemory(reserved_bytes=600).non_pytorch_bytes is None


def phases(*peaks, **changes):
    windows = (window(phase, peak) for phase, peak in zip(Phase, peaks, strict=False))
    return replace(step(*windows), **changes)


def test_a_steady_step_is_shown_rather_than_a_warm_up_and_one_with_an_update_rather_than_none():
    warm_up, small, without_update = (
        phases(900, 900, 900, is_warm_up=True),
        phases(1, 1, 1),
        phases(500, 500),
    )
    assert larger(warm_up, small) is small
    assert larger(small, warm_up) is small
    assert larger(without_update, small) is small
    assert larger(small, without_update) is small
    assert larger(None, warm_up) is warm_up


def test_of_two_equal_steps_the_second_is_shown():
    first, second = phases(5, 5, 5, index=0), phases(5, 5, 5, index=1)
    assert larger(first, second) is second


def test_of_two_steps_with_one_peak_the_fuller_phases_may_count():
    full, emptied = phases(100, 200, 90), phases(10, 201, 90)
    assert larger(full, emptied) is emptied
    assert larger(full, emptied, in_all_phases=True) is full
    assert larger(emptied, full, in_all_phases=True) is full


def test_a_step_says_its_kind_its_batch_and_where_it_comes_from():
    assert phases(5, batch_size=None).to_table().title == (
        "Memory of one training step (batch size unknown) on CPU\nmeasured by a test"
    )
    assert (
        phases(5, batch_size=8, is_warm_up=True)
        .to_table()
        .title.startswith("Memory of one training step (warm-up, batch size 8) on CPU")
    )
