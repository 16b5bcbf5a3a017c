"""A measured step corrects a prediction upwards alone; autograd bounds what fewer samples save."""

from dataclasses import replace

import pytest
import torch
from hand_made import MODEL, free_segment, law, prediction
from torch import nn

import memcallback as mc
from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import estimate, suggest
from memcallback.batch_size.peaks import TracedPeak, limits_of
from memcallback.core.step_memory import DeviceMemory, MemoryStats, PhaseMemory, StepMemory
from memcallback.core.types import Category, Kind, Phase
from memcallback.core.units import GiB, MiB
from memcallback.devices import local
from memcallback.devices.catalogue import find_device
from memcallback.prediction.comparison import RESERVED_SHARE
from memcallback.prediction.search import Limits
from memcallback.prediction.textbook.law import LinearBytes

#: The step of `hand_made` at 16 samples, as the simulated allocator has it.
PREDICTED = prediction(16)
REPLAYED = PREDICTED.peak_reserved_bytes
CAPACITY = {"capacity_bytes": GiB, "outside_bytes": 0, "headroom": 0.0}


def measured(reserved, *, batch_size=16, allocated=None, update=None, held=0):
    """A step whose backward pass has the peak, and an update of its own where one is given."""
    stats = MemoryStats(
        allocated_bytes=held, reserved_bytes=reserved, by_category={Category.PARAMETER: held}
    )

    def window(phase, peak):
        return PhaseMemory(
            phase=phase,
            covers=(phase,),
            start=stats,
            end=stats,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=reserved,
        )

    windows = [window(Phase.BACKWARD, reserved if allocated is None else allocated)]
    if update is not None:
        windows.append(window(Phase.OPTIMIZER_STEP, update))
    return StepMemory(
        kind=Kind.MEASURED,
        source="a test",
        device_name="a card",
        windows=tuple(windows),
        batch_size=batch_size,
    )


def traced(step):
    return estimate(measured=step, predicted=PREDICTED, **CAPACITY)


@pytest.mark.parametrize("less_bytes", [0, 1, 10 * MiB, REPLAYED])
def test_a_measured_step_below_the_prediction_does_not_raise_the_advice(less_bytes):
    without, low = traced(None), traced(measured(REPLAYED - less_bytes))
    assert low.largest == without.largest
    assert low.limits() == without.limits()
    assert [low.peak_at(size) for size in (1, 16, 100)] == [
        without.peak_at(size) for size in (1, 16, 100)
    ]
    assert without.basis == "The peaks were simulated from a trace"


def test_a_measured_step_far_below_is_not_said_to_agree():
    within = int(REPLAYED * (1 - RESERVED_SHARE / 2))
    assert traced(measured(within)).basis.endswith("; the measured step agrees")
    low = traced(measured(REPLAYED // 4)).basis
    less = (REPLAYED - REPLAYED // 4) / MiB
    assert low.endswith(
        f"; the measured step needs {less:.2f} MiB less, and the peaks were left as they are"
    )


def test_a_measured_step_a_little_above_is_added_everywhere():
    more_bytes = 1234
    without, high = traced(None), traced(measured(REPLAYED + more_bytes))
    for size in (1, 16, 17, 100):
        assert high.peak_at(size) == without.peak_at(size) + more_bytes
    assert high.basis == "The peaks were simulated from a trace; the measured step agrees"


def test_what_a_measured_step_needs_far_above_grows_with_the_batch():
    more_bytes = REPLAYED
    without, high = traced(None), traced(measured(REPLAYED + more_bytes))
    assert high.peak_at(16) == without.peak_at(16) + more_bytes
    assert high.peak_at(8) == without.peak_at(8) + more_bytes
    assert high.peak_at(32) == without.peak_at(32) + 2 * more_bytes
    # 17 sixteenths of it, rounded up.
    assert high.peak_at(17) == without.peak_at(17) + -(-more_bytes * 17 // 16)
    assert (
        f"raised by {more_bytes / MiB:.2f} MiB, because the measured step needs more" in high.basis
    )
    assert high.largest < without.largest


def test_where_the_band_ends_is_the_share_of_reserved_memory():
    inside = int(REPLAYED * RESERVED_SHARE / (1 - RESERVED_SHARE))
    assert "agrees" in traced(measured(REPLAYED + inside)).basis
    assert "raised by" in traced(measured(REPLAYED + inside + 2)).basis


def test_a_measured_step_of_another_size_is_compared_at_that_size():
    of_eight = prediction(8).peak_reserved_bytes
    at_eight = traced(measured(of_eight + 1000, batch_size=8))
    assert at_eight.peaks.batch_size == 8
    assert at_eight.peak_at(64) == traced(None).peak_at(64) + 1000


def test_what_lay_in_the_allocator_before_explains_what_a_step_needs_more():
    before = PREDICTED.begun_with([*MODEL, *[free_segment(3 * MiB)] * 8])
    reserved = before.at(16).run_peak_reserved_bytes
    assert reserved > REPLAYED * (1 + 2 * RESERVED_SHARE)
    found = estimate(measured=measured(reserved), predicted=before, **CAPACITY)
    assert found.basis.endswith("; the measured step agrees")
    assert "raised by" in traced(measured(reserved)).basis


def test_a_measured_step_without_a_batch_size_says_nothing():
    unknown = traced(measured(4 * REPLAYED, batch_size=None))
    assert unknown.basis == "The peaks were simulated from a trace"
    assert unknown.largest == traced(None).largest


def test_a_capacity_that_is_not_the_cards_names_whose_architecture_it_is():
    assert traced(None).architecture_of == "NVIDIA A100-SXM4-80GB"
    whole = estimate(
        measured=None, predicted=PREDICTED, capacity_bytes=PREDICTED.device.capacity_bytes
    )
    assert whole.architecture_of is None


def test_on_a_cpu_what_operators_take_for_themselves_is_left_out_and_a_device_says_reserved():
    assert traced(None).counts == "reserved"
    assert traced(None).is_measured is False
    assert not any("temporary memory" in text for text in traced(None).leaves_out)
    assert traced(None).leaves_out[0] == "validation, logging, longer samples"


def test_on_a_card_of_this_machine_a_context_that_is_not_open_yet_is_assumed(monkeypatch):
    card = replace(find_device("RTX 4060"), capacity_bytes=8 * GiB)
    here = replace(card, local_index=0)
    step = mc.TrainingStep(nn.Linear(512, 512), torch.zeros(4, 512))

    def advice(*, is_open=False, **memory):
        unused = DeviceMemory(
            capacity_bytes=card.capacity_bytes, used_bytes=0, other_processes_bytes=0
        )
        read = replace(unused, **memory)
        monkeypatch.setattr(local, "device_memory", lambda device: read)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_open)
        monkeypatch.setattr(local, "has_cuda_context", lambda index: is_open)
        return mc.suggest_batch_size(step, device=here)

    before = advice()
    assert before.budget_bytes == mc.suggest_batch_size(step, device=card).budget_bytes == 7 * GiB
    assert any(
        "the CUDA context: it is not open yet (512.00 MiB are assumed for it and for other "
        "processes; a context can be larger, so 1024.00 MiB in all are kept free)" in text
        for text in before.leaves_out
    )
    opened = advice(is_open=True, used_bytes=600 * MiB, reserved_bytes=0)
    assert opened.budget_bytes == int(0.95 * 8 * GiB) - 600 * MiB
    assert opened.most_outside_bytes is None


def test_outside_memory_that_is_unknown_is_that_of_the_device():
    unknown = estimate(measured=None, predicted=PREDICTED, capacity_bytes=GiB)
    assert unknown.outside_bytes == PREDICTED.device.outside_bytes
    assert any("other processes on the device" in text for text in unknown.leaves_out)
    assert not any("other processes" in text for text in traced(None).leaves_out)


def test_a_size_far_above_what_was_traced_asks_for_a_check():
    large = estimate(measured=None, predicted=PREDICTED, capacity_bytes=64 * GiB, outside_bytes=0)
    assert large.leaves_out[-1].endswith("(the largest traced is 7)")
    assert "runs the same way" in large.leaves_out[-1]


def test_bounds_that_fit_whole_are_the_answer_where_memory_is_no_limit():
    few = estimate(
        measured=None, predicted=PREDICTED, bounds=BatchSizeBounds(max_batch_size=3), **CAPACITY
    )
    assert few.best_batch_size() == 3


PER_SAMPLE = LinearBytes(fixed_bytes=0, per_sample_bytes=MiB)
NOTHING = LinearBytes(fixed_bytes=0, per_sample_bytes=0)


def textbook(**changes):
    """A law without held memory, whose samples take 1 MiB each for outputs and for what stays."""
    values = {
        "batch_size": 100,
        "held": {Category.PARAMETER: 0, Category.GRADIENT: 0},
        "input": NOTHING,
        "outputs": NOTHING,
        "kept": PER_SAMPLE,
        "saved": PER_SAMPLE,
        "optimizer_transient_bytes": 0,
    }
    return law(**(values | changes))


def smaller(predicted, *, capacity=140, **changes):
    """The most samples of a measured step of 200 MiB with 100 samples in a smaller capacity."""
    return suggest(
        measured=measured(200 * MiB, batch_size=100, **changes),
        predicted=predicted,
        capacity_bytes=capacity * MiB,
        outside_bytes=0,
        headroom=0,
    ).largest


def test_fewer_samples_save_no_more_than_autograd_keeps_of_each():
    # By proportion alone a sample would save 2 MiB, and 70 of 100 would fit into 140 MiB.
    assert smaller(None) == 70
    assert smaller(textbook()) == 40


def test_the_inputs_of_fewer_samples_are_saved_too():
    half = LinearBytes(fixed_bytes=0, per_sample_bytes=MiB // 2)
    assert smaller(textbook(input=half)) == 60


def test_where_autograd_keeps_more_the_proportion_decides():
    assert smaller(textbook(saved=LinearBytes(fixed_bytes=0, per_sample_bytes=9 * MiB))) == 70


def test_an_update_is_there_for_any_batch():
    # Above the update's 100 MiB a sample saves 1 MiB.
    assert smaller(None, update=100 * MiB) == 40
    # Above 150 MiB it saves half of one.
    assert smaller(None, update=150 * MiB, capacity=151) == 2
    assert smaller(None, update=150 * MiB, capacity=149) == 0


def test_reserved_memory_of_the_update_is_its_share_of_the_peak():
    # 100 of 100 MiB allocated are 200 of 200 MiB reserved: nothing is saved by fewer samples.
    assert smaller(None, allocated=100 * MiB, update=100 * MiB) == 0
    # 50 of 100 are 100 of 200.
    assert smaller(None, allocated=100 * MiB, update=50 * MiB) == 40


def test_an_update_above_the_peak_counts_as_the_peak():
    assert smaller(None, allocated=100 * MiB, update=400 * MiB, capacity=200) == 100


def test_memory_that_is_always_held_does_not_grow():
    def largest(held_bytes):
        return suggest(
            measured=measured(200 * MiB, batch_size=100, held=held_bytes),
            predicted=None,
            capacity_bytes=300 * MiB,
            outside_bytes=0,
            headroom=0,
        ).largest

    assert largest(0) == 150
    assert largest(100 * MiB) == 200


def test_what_an_update_makes_does_not_grow():
    def largest(update):
        # 100 samples take 100 MiB, and the update 400 MiB whatever the batch.
        step = measured(400 * MiB, batch_size=100, allocated=100 * MiB, update=update)
        return suggest(
            measured=step,
            predicted=None,
            capacity_bytes=500 * MiB,
            outside_bytes=0,
            headroom=0,
        ).largest

    assert largest(400 * MiB) == 200
    assert largest(None) == 125


def test_an_update_with_the_passes_inside_grows():
    step = measured(400 * MiB, batch_size=100, allocated=400 * MiB, update=400 * MiB)
    alone = replace(step, windows=step.windows[1:])  # a closure whose backward pass nothing marks
    found = suggest(
        measured=alone,
        predicted=None,
        capacity_bytes=500 * MiB,
        outside_bytes=0,
        headroom=0,
    )
    assert found.largest == 125


def test_both_a_step_and_its_validation_must_fit():
    training = estimate(measured=None, predicted=PREDICTED, **CAPACITY)
    validation = replace(training, largest=5, peaks=replace(training.peaks, shift_bytes=700 * MiB))
    both = replace(training, validation=validation)
    assert both.peak_at(16) == training.peak_at(16) + 700 * MiB
    assert training.fits(training.largest)
    assert not both.fits(training.largest)
    assert both.fits(8)
    own, other, smaller_ones = training.limits(), validation.limits(), both.limits()
    assert smaller_ones.at_all == other.at_all < own.at_all
    assert smaller_ones.without_retry == other.without_retry < own.without_retry
    assert replace(validation, validation=training).limits().at_all == other.at_all
    assert both.advice().limit == other.at_all


def test_with_all_memory_for_the_taking_the_advice_is_at_most_the_limit():
    free = estimate(measured=None, predicted=PREDICTED, **CAPACITY)
    advised = free.advice()
    assert advised.largest <= advised.limit
    assert advised.limit_without_retry <= advised.limit
    assert free.fits(advised.largest)
    assert not free.fits(advised.limit + 1)


@pytest.mark.parametrize(("batch_size", "times"), [(8, 1), (16, 1), (17, 17 / 16), (64, 4)])
def test_a_shift_per_sample_begins_above_the_known_size(batch_size, times):
    peaks = TracedPeak.of(PREDICTED)
    shifted = replace(peaks, shift_bytes=16_000, is_shift_per_sample=True)
    assert shifted.at(batch_size) - peaks.at(batch_size) == 16_000 * times
    assert replace(shifted, is_shift_per_sample=False).at(64) - peaks.at(64) == 16_000
    assert TracedPeak(replays=peaks.replays, batch_size=16, shift_bytes=7).at(64) == (
        peaks.at(64) + 7
    )


def test_reserved_memory_of_no_samples_is_its_share_of_the_peak():
    # Without samples 50 MiB of 100 MiB allocated are 100 of 200 MiB reserved: 100 samples take
    # the other 100.
    held = {Category.PARAMETER: 50 * MiB, Category.GRADIENT: 0}
    many = LinearBytes(fixed_bytes=0, per_sample_bytes=9 * MiB)
    assert smaller(textbook(held=held, saved=many), allocated=100 * MiB, capacity=150) == 50


def test_advice_for_forward_passes_leaves_out_no_validation():
    advised = mc.suggest_batch_size(
        mc.InferenceStep(torch.nn.Linear(8, 8), torch.ones(16, 8)),
        device="T4",
        isolate=False,
        max_batch_size=128,
    )
    assert advised.leaves_out[0] == "logging, longer samples"


class WithAGap:
    """Replays of a step in which 41 samples fail, and 60 fit again."""

    device = find_device("T4")

    def on(self, device):
        return self

    def limits(self, batch_size):
        return Limits(at_all=40, without_retry=60, fits_again=60)

    def peak_bytes(self, batch_size):
        return batch_size * MiB

    def fits_without_retry(self, batch_size):
        return batch_size <= 30 or batch_size == 60

    def largest(self, holds, start):
        return next(size for size in range(99, 0, -1) if holds(size))

    def largest_up_to(self, most, holds):
        return next(size for size in range(most, 0, -1) if holds(size))


def test_beyond_a_gap_nothing_counts_as_fitting_without_a_retry():
    peaks = TracedPeak(replays=WithAGap(), batch_size=10)
    assert peaks.largest_within(100 * MiB) == 60
    assert limits_of(peaks, 100 * MiB) == Limits(at_all=40, without_retry=30, fits_again=60)
    assert limits_of(peaks, 20 * MiB).without_retry == 20


@pytest.mark.parametrize(("capacity", "is_uncertain"), [(199, True), (200, False), (201, False)])
def test_only_for_a_smaller_batch_is_it_unsure_what_fewer_samples_save(capacity, is_uncertain):
    advised = suggest(
        measured=measured(200 * MiB, batch_size=100),
        predicted=None,
        capacity_bytes=capacity * MiB,
        outside_bytes=0,
        headroom=0,
    )
    unsure = "that does not shrink with the batch"
    assert any(unsure in text for text in advised.leaves_out) is is_uncertain
