import pytest
from hand_made import law as prediction
from hypothesis import given
from hypothesis import strategies as st

from memcallback.batch_size.estimate import estimate, suggest
from memcallback.core.step_memory import MemoryStats, PhaseMemory, StepMemory
from memcallback.core.types import Category, Kind, Phase
from memcallback.core.units import GiB, MiB
from memcallback.prediction.textbook.law import LinearBytes


def test_memory_is_model_memory_plus_batch_size_times_memory_per_sample():
    law = prediction()
    at_zero = 4010 + 2 * 100
    assert law.per_sample_bytes == 5 + 320 + 300
    for batch_size in (1, 10, 4096):
        assert (
            law.at(batch_size).peak_allocated_bytes == at_zero + batch_size * law.per_sample_bytes
        )


def test_memory_is_not_proportional_to_the_batch_size():
    law = prediction()
    assert law.at(20).peak_allocated_bytes < 2 * law.at(10).peak_allocated_bytes


def test_each_phase_has_its_start_end_peak_and_lower_edge():
    phases = prediction().phases
    held, batch, outputs, kept, saved = 3010, 50, 3100, 3300, 2000
    forward = phases[Phase.FORWARD]
    assert (forward.start.allocated_bytes, forward.end.allocated_bytes) == (
        held + batch,
        held + batch + kept,
    )
    assert (forward.low_bytes, forward.peak_allocated_bytes) == (
        held + batch + saved,
        held + batch + kept,
    )
    backward = phases[Phase.BACKWARD]
    assert backward.peak_allocated_bytes == held + 1000 + batch + kept + outputs
    assert backward.low_bytes == held + batch + saved
    assert backward.end.allocated_bytes == held + 1000 + batch
    update = phases[Phase.OPTIMIZER_STEP]
    assert (update.low_bytes, update.peak_allocated_bytes) == (
        held + 1000 + batch,
        held + 1000 + batch + 500,
    )


def test_gradients_that_live_through_the_forward_pass_add_to_it_alone():
    early, late = prediction().phases, prediction(gradients_live_in_forward=True).phases
    assert (
        late[Phase.FORWARD].peak_allocated_bytes - early[Phase.FORWARD].peak_allocated_bytes == 1000
    )
    assert late[Phase.BACKWARD] == early[Phase.BACKWARD]


def test_the_categories_at_the_peak_sum_up_to_the_peak():
    for law in (
        prediction(),
        prediction(workspace_bytes=64),
        prediction(batch_size=1, optimizer_transient_bytes=10**9),
    ):
        assert sum(law.by_category.values()) == law.peak_allocated_bytes


def test_it_fits_where_the_peak_is_within_the_capacity():
    peak = prediction().peak_allocated_bytes
    assert prediction().fits is None
    assert prediction(capacity_bytes=peak).fits is True
    assert prediction(capacity_bytes=peak - 1).fits is False


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        prediction().at(0)


def measured_step(*, batch_size=10, reserved=None, allocated=None, held=1 * GiB):
    allocated = reserved if allocated is None else allocated
    stats = MemoryStats(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        by_category={Category.PARAMETER: held, Category.INPUT: 1},
    )
    window = PhaseMemory(
        phase=Phase.BACKWARD,
        covers=(Phase.BACKWARD,),
        start=stats,
        end=stats,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
    )
    return StepMemory(
        kind=Kind.MEASURED,
        source="a test",
        device_name="a card",
        windows=(window,),
        batch_size=batch_size,
    )


def with_peaks(**options):
    """The suggestion, and the peaks over batch sizes that it comes from."""
    found = estimate(**options)
    return found.advice(), found.peaks


def test_a_measured_step_gives_the_largest_batch_within_capacity_less_headroom():
    advice, peaks = with_peaks(
        measured=measured_step(reserved=11 * GiB),
        predicted=None,
        capacity_bytes=100 * GiB,
        outside_bytes=0,
    )
    assert advice.is_measured
    assert "reserved memory measured on this device" in advice.basis
    assert peaks.growth_bytes == GiB
    assert advice.largest == 94
    assert advice.multiple == 8.8
    assert (
        "Largest batch size: 94 with 5 % of 100.00 GiB kept free. Suggested: 88, a multiple of 8, "
        "8.80x the current 10." in advice.sentence()
    )


def test_what_others_use_is_taken_off_the_capacity_and_said_to_be_left_out_if_unknown():
    step = measured_step(reserved=11 * GiB)
    known = suggest(measured=step, predicted=None, capacity_bytes=100 * GiB, outside_bytes=10 * GiB)
    unknown = suggest(measured=step, predicted=None, capacity_bytes=100 * GiB)
    assert known.largest == 84
    assert not any("outside this process's allocator" in text for text in known.leaves_out)
    assert any("outside this process's allocator" in text for text in unknown.leaves_out)


def test_without_a_measured_step_the_law_decides_and_says_so():
    one = LinearBytes(fixed_bytes=0, per_sample_bytes=MiB)
    law = prediction(
        batch_size=1, outputs=one, kept=one, input=LinearBytes(fixed_bytes=0, per_sample_bytes=0)
    )
    advice = suggest(
        measured=None, predicted=law, capacity_bytes=21 * MiB, outside_bytes=0, headroom=0
    )
    assert not advice.is_measured
    assert "The peaks are predicted by the textbook estimate" in advice.basis
    assert advice.largest == 10
    assert any("reserved but unallocated" in text for text in advice.leaves_out)


def test_where_not_one_sample_fits_the_advice_says_so():
    advice = suggest(
        measured=measured_step(reserved=11 * GiB),
        predicted=None,
        capacity_bytes=GiB,
        outside_bytes=0,
    )
    assert advice.batch_size == 0
    assert "No batch size is sure to fit: one sample may need" in advice.sentence()


def test_without_capacity_batch_size_or_figures_there_is_no_advice():
    step = measured_step(reserved=GiB)
    assert suggest(measured=step, predicted=None, capacity_bytes=None) is None
    assert (
        suggest(
            measured=measured_step(reserved=GiB, batch_size=None),
            predicted=None,
            capacity_bytes=GiB,
        )
        is None
    )
    assert suggest(measured=None, predicted=None, capacity_bytes=GiB) is None


@pytest.mark.parametrize("headroom", [-0.1, 1.0, 5])
def test_a_headroom_out_of_range_is_refused(headroom):
    with pytest.raises(
        ValueError, match=r"headroom must be at least 0 and below 1, got .*0.05 keeps 5 %"
    ):
        suggest(measured=None, predicted=prediction(), capacity_bytes=GiB, headroom=headroom)


@given(
    reserved=st.integers(MiB, 200 * GiB),
    held=st.integers(0, 100 * GiB),
    batch_size=st.integers(1, 4096),
    capacity=st.integers(MiB, 200 * GiB),
    outside=st.integers(0, 10 * GiB),
    headroom=st.floats(0, 0.9),
)
def test_a_suggestion_never_exceeds_its_budget_and_one_more_sample_would(
    reserved, held, batch_size, capacity, outside, headroom
):
    step = measured_step(reserved=reserved, held=held, batch_size=batch_size)
    advice, peaks = with_peaks(
        measured=step,
        predicted=None,
        capacity_bytes=capacity,
        outside_bytes=outside,
        headroom=headroom,
    )
    assert peaks.at(batch_size) >= reserved
    if advice.batch_size > 0:
        assert peaks.at(advice.batch_size) <= advice.budget_bytes
    if peaks.growth_bytes > 0:
        assert peaks.at(advice.largest + 1) > advice.budget_bytes


def with_phases(forward, backward, update, *, batch_size=100):
    """A step given for each phase what is held at its start and end, and its peak, in MiB."""
    windows = []
    for phase, (start, end, peak) in zip(Phase, (forward, backward, update), strict=True):
        at_start, at_end = (
            MemoryStats(allocated_bytes=held * MiB, by_category={Category.PARAMETER: held * MiB})
            for held in (start, end)
        )
        windows.append(
            PhaseMemory(
                phase=phase,
                covers=(phase,),
                start=at_start,
                end=at_end,
                peak_allocated_bytes=peak * MiB,
            )
        )
    return StepMemory(
        kind=Kind.MEASURED,
        source="a test",
        device_name="a card",
        windows=tuple(windows),
        batch_size=batch_size,
    )


def test_gradients_that_are_not_there_with_the_activations_do_not_hide_their_growth():
    # 100 MiB of parameters, 100 of gradients that come while 90 of activations go: the peak is
    # barely above what is held.
    step = with_phases((100, 100, 190), (100, 200, 205), (200, 200, 200))
    advice, peaks = with_peaks(
        measured=step, predicted=None, capacity_bytes=1000 * MiB, outside_bytes=0, headroom=0
    )
    assert advice.largest <= 100 * (1000 - 100) / 90
    assert peaks.at(1000) >= (100 + 900) * MiB


def test_what_a_step_of_no_samples_needs_by_the_prediction_is_not_taken_for_the_samples():
    # Gradients stay, and autocast's copies of the weights, 50 MiB, stand in the forward pass
    # whatever the batch.
    step = with_phases((100, 100, 230), (100, 100, 200), (100, 100, 100), batch_size=80)
    law = prediction(
        batch_size=80,
        held={Category.PARAMETER: 50 * MiB, Category.GRADIENT: 50 * MiB},
        input=LinearBytes(fixed_bytes=0, per_sample_bytes=0),
        outputs=LinearBytes(fixed_bytes=0, per_sample_bytes=MiB),
        kept=LinearBytes(fixed_bytes=50 * MiB, per_sample_bytes=MiB),
        saved=LinearBytes(fixed_bytes=50 * MiB, per_sample_bytes=MiB),
        optimizer_transient_bytes=0,
    )
    advice = suggest(
        measured=step, predicted=law, capacity_bytes=200 * MiB, outside_bytes=0, headroom=0
    )
    # 80 samples take 80 MiB above the 150 of none: 50 of them may stay, and not 61 as from 100.
    assert advice.largest == 50
    alone = suggest(
        measured=step, predicted=None, capacity_bytes=200 * MiB, outside_bytes=0, headroom=0
    )
    assert any("test the suggested batch size" in text for text in alone.leaves_out)


def test_a_smaller_batch_saves_in_proportion_what_the_peak_has_above_the_optimizer_step():
    step = with_phases((50, 50, 200), (50, 100, 200), (100, 100, 120), batch_size=80)
    shrink, peaks = with_peaks(
        measured=step, predicted=None, capacity_bytes=160 * MiB, outside_bytes=0, headroom=0
    )
    assert shrink.batch_size == 40
    assert peaks.at(0) == 120 * MiB
    assert (
        suggest(
            measured=step, predicted=None, capacity_bytes=110 * MiB, outside_bytes=0, headroom=0
        ).batch_size
        == 0
    )


@given(
    lines=st.lists(st.tuples(st.integers(100, 400), st.integers(0, 50)), min_size=1, max_size=5),
    update=st.integers(200, 400),
    batch_size=st.integers(1, 50),
    other=st.integers(1, 200),
)
def test_the_line_lies_above_every_step_whose_moments_are_straight_lines(
    lines, update, batch_size, other
):
    """A true step: at each moment, something fixed (at least 100 held, at most what the update
    needs) and something per sample.
    """
    moments = [(min(fixed, update), slope) for fixed, slope in lines]

    def truth(size):
        return max(update, *(fixed + size * slope for fixed, slope in moments)) * MiB

    step = with_phases(
        (100, 100, truth(batch_size) // MiB),
        (100, 200, truth(batch_size) // MiB),
        (200, 200, update),
        batch_size=batch_size,
    )
    line = estimate(
        measured=step, predicted=None, capacity_bytes=GiB, outside_bytes=0, headroom=0
    ).peaks
    assert line.at(other) + batch_size >= truth(other)
