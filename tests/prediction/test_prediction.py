from dataclasses import replace

import pytest
import torch
from hand_made import SAMPLE_BYTES, WEIGHT_BYTES, batch_trace, prediction, traced_step
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_ranks
from torch import nn

from memcallback import Ranks, TrainingStep, predict
from memcallback.batch_size.estimate import estimate, suggest
from memcallback.batch_size.peaks import TracedPeak
from memcallback.core.allocation_trace import Alloc, AllocationTrace, Free
from memcallback.core.types import Category, Kind, Phase
from memcallback.core.units import GiB, MiB, format_bytes, round_up
from memcallback.devices.catalogue import HostSpec, find_device
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace, UnknownBatchSize
from memcallback.prediction.prediction import Prediction
from memcallback.trace.traced_step import TracedStep

SMALL_BYTES = 512 * MiB + 64 * MiB


def with_peaks(**options):
    """The suggestion, and the peaks over batch sizes that it comes from."""
    found = estimate(**options)
    return found.advice(), found.peaks


def held(batch_size):
    """What a steady step of the trace made by hand holds outside its phases, in blocks of 512
    bytes.
    """
    return 4 * WEIGHT_BYTES + 512 + round_up(batch_size * 1000, 512)


def test_each_phase_has_what_stands_at_its_ends_and_its_peak():
    phases = prediction(16).phases
    forward, backward, update = (phases[phase] for phase in Phase)
    outputs = 16 * SAMPLE_BYTES + 512
    assert (forward.start.allocated_bytes, forward.end.allocated_bytes) == (
        held(16),
        held(16) + outputs,
    )
    assert backward.start.allocated_bytes == held(16) - WEIGHT_BYTES + outputs
    assert backward.peak_allocated_bytes == held(16) + outputs + 16 * SAMPLE_BYTES
    assert update.peak_allocated_bytes == held(16) + WEIGHT_BYTES
    assert update.end.allocated_bytes == held(16)


def test_a_boundary_has_all_the_figures_of_an_allocator_and_what_is_held_as_it_was_asked_for():
    start = prediction(16).phases[Phase.FORWARD].start
    assert start.requested_bytes == 4 * WEIGHT_BYTES + 400 + 16_000
    assert start.active_bytes == start.allocated_bytes
    assert start.reserved_bytes == 58 * MiB
    assert start.inactive_split_bytes > 0
    assert start.by_category == {
        Category.PARAMETER: WEIGHT_BYTES + 400,
        Category.BUFFER: 0,
        Category.GRADIENT: WEIGHT_BYTES,
        Category.OPTIMIZER_STATE: 2 * WEIGHT_BYTES,
        Category.INPUT: 16_000,
    }


def test_the_step_is_the_last_one_and_the_warm_up_the_first():
    predicted = prediction(16, num_steps=3)
    assert len(predicted.steps) == 3
    assert (predicted.warm_up, predicted.step) == (predicted.steps[0], predicted.steps[-1])
    assert [step.is_warm_up for step in predicted.steps] == [True, False, False]
    assert predicted.warm_up.phases[Phase.FORWARD].start.by_category[Category.GRADIENT] == 0
    assert predicted.step.kind is Kind.PREDICTED
    assert predicted.step.source == "traced step"
    assert predicted.step.device_name == "NVIDIA A100-SXM4-80GB"
    assert all(window.low_bytes is None for window in predicted.step.windows)


def test_what_stands_at_the_peak_adds_up_to_it():
    predicted = prediction(16)
    for split in (predicted.by_category, predicted.by_module, predicted.by_operator):
        assert sum(split.values()) == predicted.peak_allocated_bytes
    assert predicted.peak_phase is Phase.BACKWARD
    assert predicted.by_category[Category.ACTIVATION] == 16 * SAMPLE_BYTES + 512
    assert list(predicted.by_module) == ["net.linear", ""]
    assert [standing.alloc.operator for standing in predicted.at_peak[:2]] == [
        "aten::addmm",
        "aten::mean_backward",
    ]
    assert predicted.at_peak[0].alloc.size_bytes == 16 * SAMPLE_BYTES


def test_another_batch_size_is_as_exact_as_a_trace_of_it():
    traced = Prediction.of(
        BatchTrace.single(traced_step(40)),
        find_device("NVIDIA A100-SXM4-80GB"),
        settings=AllocatorSettings(),
    )
    assert prediction(16).at(40).steps == traced.steps
    with pytest.raises(UnknownBatchSize, match="so batch size 41 is unknown"):
        traced.at(41)


def test_the_limits_are_the_largest_sizes_that_fit():
    predicted = prediction(16, device=SMALL_BYTES)
    assert predicted.at(predicted.limit).fits
    assert not predicted.at(predicted.limit + 1).fits
    assert predicted.at(predicted.limit_without_retry).fits_without_retry
    assert not predicted.at(predicted.limit_without_retry + 1).fits_without_retry
    assert 1 <= predicted.limit_without_retry <= predicted.limit


def test_where_it_does_not_fit_the_peaks_are_those_without_an_end_and_the_place_is_named():
    predicted = prediction(64, device=SMALL_BYTES)
    assert not predicted.fits
    assert not predicted.fits_without_retry
    assert predicted.peak_allocated_bytes == prediction(64).peak_allocated_bytes
    assert predicted.step.num_alloc_retries is None
    assert predicted.out_of_memory.startswith(
        "step 1, forward, aten::addmm in module 'net.linear': Tried to allocate 64.00 MiB of a"
    )
    assert prediction(64).step.num_alloc_retries == 0


def test_where_not_one_sample_fits_the_limit_is_none_of_them():
    assert prediction(1, device=512 * MiB + MiB).limit == 0


def test_without_other_batch_sizes_or_growth_there_is_no_limit():
    single = Prediction.of(BatchTrace.single(traced_step(2)), find_device("A100"))
    assert single.limit is None
    flat = BatchTrace.fit(*(TracedStep(traced_step(2).trace, size) for size in (2, 3)))
    assert Prediction.of(flat, find_device("A100")).limit_without_retry is None


def test_what_was_assumed_is_listed():
    settings = AllocatorSettings.parse("garbage_collection_threshold:0.8")
    trace = batch_trace(caveats=("A value was guessed.",))
    caveats = Prediction.of(trace, find_device("24GiB"), settings=settings).caveats
    assert caveats[0] == "A value was guessed."
    assert caveats[1].startswith("Only the size of the card is known")
    assert caveats[2].startswith("512.00 MiB of the card are assumed to be outside the allocator")
    assert caveats[3] == "The allocator's setting garbage_collection_threshold is not simulated."


def test_the_allocator_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert Prediction.of(batch_trace(), find_device("A100")).settings.expandable_segments


def test_a_trace_without_a_step_is_refused():
    trace = BatchTrace.single(TracedStep(AllocationTrace((Alloc(0, 1),)), 1))
    with pytest.raises(ValueError, match="the trace has no step to predict: put StepStart"):
        Prediction.of(trace, find_device("A100"))


def test_another_device_may_be_given_as_a_person_would_write_it():
    predicted = prediction(device="H100")
    small = predicted.on("24GiB")
    assert (small.capacity_bytes, small.device.compute_capability) == (24 * GiB, (9, 0))
    assert "which is assumed to be that of NVIDIA H100 80GB HBM3" in small.device.caveats[0]
    other = predicted.on("T4")
    assert other.device_name == "Tesla T4"
    assert other.caveats[-2] == (
        "The step was traced for NVIDIA H100 80GB HBM3 (compute capability 9.0), so workspaces and "
        "kernels are those of that card. memcallback.predict(step, device=...) traces it for Tesla "
        "T4."
    )
    with pytest.raises(ValueError, match="'rtx 9090' is not a known card"):
        predicted.on("rtx 9090")


@needs_ranks
def test_on_another_card_a_job_still_needs_the_memory_of_its_communication():
    step = TrainingStep(nn.Linear(512, 512), torch.zeros(8, 512), ranks=Ranks(2))
    there = predict(step, device="NVIDIA A100-SXM4-40GB")
    on = predict(step, device="NVIDIA A100-SXM4-80GB").on("NVIDIA A100-SXM4-40GB")
    assert on.device == there.device
    assert on.device.communication_bytes > 0
    assert on.limits == there.limits


def test_what_was_traced_for_a_card_is_not_put_on_a_cpu():
    with pytest.raises(
        ValueError,
        match=r"traced for NVIDIA .* cannot be put on CPU: operators allocate differently there. "
        r".*predict",
    ):
        prediction(device="H100").on("cpu")


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        prediction().at(0)


@settings(max_examples=30)
@given(batch_size=st.integers(1, 300))
def test_a_prediction_is_the_replay_of_its_trace(batch_size):
    predicted = prediction(batch_size)
    allocator, blocks = CachingAllocator(AllocatorSettings()), {}
    for event in traced_step(batch_size).trace.events:
        if isinstance(event, Alloc) and event.size_bytes:
            blocks[event.id] = allocator.allocate(event.size_bytes, event.stream)
        elif isinstance(event, Free) and event.id in blocks:
            allocator.free(blocks.pop(event.id))
    assert (
        max(step.peak_allocated_bytes for step in predicted.steps) == allocator.peak_allocated_bytes
    )
    assert (
        max(step.peak_reserved_bytes for step in predicted.steps)
        == allocator.stats().peak_reserved_bytes
    )


def test_a_suggestion_is_the_largest_batch_whose_reserved_peak_stays_within_the_budget():
    predicted = prediction(16, device=SMALL_BYTES)
    advice, peaks = with_peaks(
        measured=None, predicted=predicted, capacity_bytes=SMALL_BYTES, headroom=0
    )
    assert peaks.at(advice.batch_size) <= advice.budget_bytes == 64 * MiB
    assert peaks.at(advice.largest + 1) > advice.budget_bytes
    assert "The peaks were simulated from a trace" in advice.sentence()
    counted = "other processes on the device (only the CUDA context is counted, with 512.00 MiB"
    assert any(text.startswith(counted) for text in advice.leaves_out)
    of_a_rank = replace(predicted.device, communication_bytes=MiB)
    advice = suggest(
        measured=None,
        predicted=prediction(16, device=of_a_rank),
        capacity_bytes=SMALL_BYTES,
        headroom=0,
    )
    assert any(
        "only the CUDA context and NCCL are counted, with 513" in text for text in advice.leaves_out
    )
    smaller = suggest(measured=None, predicted=predicted, capacity_bytes=SMALL_BYTES, headroom=0.05)
    assert smaller.largest < advice.largest


def test_where_the_context_is_assumed_a_suggestion_leaves_the_largest_that_was_seen():
    capacity_bytes = 8 * GiB
    predicted = prediction(16, device=capacity_bytes)

    def advice(**options):
        return suggest(measured=None, predicted=predicted, capacity_bytes=capacity_bytes, **options)

    assumed = advice()
    assert assumed.budget_bytes == 7 * GiB
    assert any(
        "counted, with 512.00 MiB; a context can be larger, so 1024.00 MiB in all are kept free)"
        in text
        for text in assumed.leaves_out
    )
    assert assumed.to_dict()["most_outside_bytes"] == GiB
    assert " with 1024.00 MiB of 8.00 GiB kept free." in assumed.sentence()
    assert " with 1024.00 MiB kept free. " in " ".join(predicted.verdict())
    more = advice(headroom=0.25)
    assert more.budget_bytes == 6 * GiB - 512 * MiB
    assert not any("are kept free" in text for text in more.leaves_out)
    measured = advice(outside_bytes=512 * MiB)
    assert measured.budget_bytes == int(0.95 * capacity_bytes) - 512 * MiB
    assert predicted.largest_batch_size == assumed.largest < measured.largest


def test_a_step_that_fits_with_the_assumed_context_alone_says_so():
    predicted = prediction(16, device=8 * GiB)
    assert not any("The step fits if" in text for text in predicted.caveats)
    close = predicted.at(predicted.limit_without_retry)
    left = 8 * GiB - max(step.peak_reserved_bytes for step in close.steps)
    assert (
        f"The step fits if context and driver take no more than {format_bytes(left)} on your card."
        in (close.caveats)
    )


def test_what_was_measured_more_is_added_to_every_batch_size():
    predicted = prediction(16)
    measured = prediction(20).step
    shifted = suggest(
        measured=measured,
        predicted=predicted,
        capacity_bytes=predicted.capacity_bytes,
        outside_bytes=0,
    )
    assert "the measured step agrees" in shifted.sentence()
    assert shifted.current_batch_size == 20
    larger = prediction(
        20, extra=(Alloc(9000, 40 * MiB, 0, Category.WORKSPACE), Free(9000)), num_steps=1
    ).step
    shifted = suggest(
        measured=larger,
        predicted=prediction(16, num_steps=1),
        capacity_bytes=predicted.capacity_bytes,
        outside_bytes=0,
    )
    assert "raised by 20.00 MiB, because the measured step needs more" in shifted.sentence()


def test_a_trace_of_one_batch_size_leaves_the_advice_to_the_measured_step():
    single = Prediction.of(BatchTrace.single(traced_step(2)), find_device("A100"))
    assert suggest(measured=None, predicted=single, capacity_bytes=80 * MiB) is None
    advice = suggest(measured=prediction(2).step, predicted=single, capacity_bytes=10_000 * MiB)
    assert advice.is_measured


def host_prediction(batch_size=16, capacity_bytes=None, trace=None):
    return Prediction.of(
        trace or batch_trace(), HostSpec(capacity_bytes=capacity_bytes), batch_size=batch_size
    )


def test_on_a_cpu_allocated_is_what_was_asked_for_and_nothing_is_reserved():
    predicted = host_prediction(16)
    forward = predicted.phases[Phase.FORWARD]
    assert (
        forward.start.allocated_bytes
        == forward.start.requested_bytes
        == 4 * WEIGHT_BYTES + 400 + 16_000
    )
    assert forward.end.allocated_bytes == forward.start.allocated_bytes + 16 * SAMPLE_BYTES + 4
    assert predicted.peak_allocated_bytes == 4 * WEIGHT_BYTES + 404 + 16_000 + 32 * SAMPLE_BYTES
    assert (
        sum(standing.block_bytes for standing in predicted.at_peak)
        == predicted.peak_allocated_bytes
    )
    assert (
        predicted.peak_reserved_bytes,
        forward.peak_reserved_bytes,
        forward.start.reserved_bytes,
    ) == (None, None, None)
    assert (forward.num_alloc_retries, forward.num_ooms) == (None, None)


def test_a_cpu_of_unknown_capacity_has_no_limit_and_one_of_a_known_one_has():
    assert host_prediction().fits
    assert host_prediction().limit is None
    assert host_prediction().limit_without_retry is None
    needed = host_prediction(40).peak_allocated_bytes
    predicted = host_prediction(16, needed)
    assert predicted.limit == predicted.limit_without_retry == 40
    assert host_prediction(16, needed - 1).limit == 39
    assert host_prediction(40, needed - 1).out_of_memory.startswith(
        "step 2, backward, aten::mm in module 'net.linear': Tried to allocate 4.00 MiB"
    )


def test_equal_batch_sizes_are_said_once():
    needed = host_prediction(3).peak_allocated_bytes
    equal = host_prediction(1, 1 + int(needed / 0.95))
    assert equal.limit == equal.largest_batch_size == 3
    assert equal.verdict()[1].startswith(
        "Largest batch size: 3, with or without 5 % kept free. Batches above 3 are"
    )
    assert equal.to_dict()["largest_batch_size"] == equal.to_dict()["limit_batch_size"] == 3


def test_where_no_sample_fits_that_is_said_in_words():
    needed = host_prediction(1).peak_allocated_bytes
    prediction = host_prediction(1, needed - 1)
    assert prediction.limit == 0
    assert prediction.verdict()[2:] == ("Not even one sample fits.",)


def test_the_verdict_comes_before_the_tables():
    prediction = host_prediction(capacity_bytes=800 * MiB)
    lines = str(prediction).splitlines()
    assert lines[0] == prediction.verdict()[0]
    assert lines.index("") < next(
        position for position, line in enumerate(lines) if line.startswith("Memory of one")
    )


def test_the_words_about_a_cpu():
    fits = host_prediction(capacity_bytes=800 * MiB)
    assert fits.verdict() == (
        "Fits. Peak 48.0 MiB allocated in backward; the CPU has 800 MiB.",
        f"Largest batch size: {fits.largest_batch_size} with 5 % kept free. With nothing kept "
        f"free: {fits.limit}. "
        f"Batches above {fits.limit} are assumed not to fit.",
    )
    too_small = host_prediction(capacity_bytes=3 * MiB).verdict()
    assert too_small[0].startswith("Does not fit. Peak ")
    assert too_small[1].startswith("Out of memory in step 1, an allocation")
    single = host_prediction(2, GiB, trace=BatchTrace.single(traced_step(2)))
    assert (
        single.verdict()[1]
        == "The largest batch size is unknown: only this batch size was traced. "
        "suggest_batch_size traces others, unless the batch cannot be made larger."
    )
    assert host_prediction().verdict()[1:] == (
        "Whether it fits is unknown: the capacity of the CPU was not given.",
    )
    assert len(host_prediction().caveats) == 1


def test_what_was_measured_beyond_the_band_grows_with_the_batch():
    predicted = prediction(16)
    for share, is_per_sample in ((0.01, False), (0.2, True)):
        more = int(share * predicted.peak_reserved_bytes)
        windows = tuple(
            replace(window, peak_reserved_bytes=predicted.peak_reserved_bytes + more)
            for window in predicted.step.windows
        )
        measured = replace(predicted.step, windows=windows)
        line = estimate(
            measured=measured,
            predicted=predicted,
            capacity_bytes=predicted.capacity_bytes,
            outside_bytes=0,
        ).peaks
        assert line.at(16) - TracedPeak.of(predicted).at(16) == more
        assert line.at(32) - TracedPeak.of(predicted).at(32) == (
            2 * more if is_per_sample else more
        )
        assert line.at(8) - TracedPeak.of(predicted).at(8) == more


def test_memory_to_plan_for_need_not_be_the_devices_own():
    predicted = prediction(16, device=SMALL_BYTES)
    more, peaks = with_peaks(
        measured=None,
        predicted=predicted,
        capacity_bytes=4 * SMALL_BYTES,
        outside_bytes=0,
        headroom=0,
    )
    assert peaks.at(more.batch_size) > SMALL_BYTES


def test_on_a_cpu_the_allocated_peak_has_to_fit():
    predicted = host_prediction(16)
    advice = suggest(measured=None, predicted=predicted, capacity_bytes=GiB, headroom=0)
    assert (
        predicted.at(advice.batch_size).peak_allocated_bytes
        <= GiB
        < predicted.at(advice.largest + 1).peak_allocated_bytes
    )
    assert "temporary memory inside operators" in advice.leaves_out


def test_a_limit_far_beyond_what_was_traced_says_what_is_assumed():
    near = prediction(device="1GiB")
    assert near.verdict()[1].endswith(f"Batches above {near.limit:,} are assumed not to fit.")
    far = prediction(device="80GiB").verdict()[1]
    assert far.endswith(
        "are assumed not to fit. Batches above the largest traced, 7, are assumed to run the same "
        "way."
    )
