"""A training that begins with the segments that something before it has left in the allocator."""

from dataclasses import replace

import pytest
from hand_made import MODEL, free_segment, prediction, traced_step
from hypothesis import given
from hypothesis import strategies as st
from virtual_device import AscendingAddresses

from memcallback.batch_size.estimate import suggest
from memcallback.core.allocation_trace import Alloc, AllocationTrace, Free, StepStart
from memcallback.core.types import Category
from memcallback.core.units import GiB, KiB, MiB, format_bytes
from memcallback.devices.catalogue import find_device
from memcallback.prediction.allocator import blocks
from memcallback.prediction.allocator.at_start import Part, Segment, read_segments
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.memory_viz import snapshot
from memcallback.prediction.prediction import Prediction

WORKSPACE_BYTES = 32 * MiB
FIRST_OF_BEFORE, WORKSPACE = 20_000, 30_000


def with_workspace(traced):
    """The step with a workspace that cuBLAS makes in its first phase and keeps."""
    events = list(traced.trace.events)
    place = next(number for number, event in enumerate(events) if isinstance(event, StepStart)) + 3
    workspace = Alloc(WORKSPACE, WORKSPACE_BYTES, 0, Category.WORKSPACE, "aten::addmm", "")
    return replace(traced, trace=AllocationTrace((*events[:place], workspace, *events[place:])))


def after(traced, sizes, *, with_workspace_at=None, is_before_model=False, is_freed=True):
    """The step in a process that has allocated and freed so many bytes: after the model was there,
    or before. If asked for, its workspace is there, too.
    """
    events = list(traced.trace.events)
    place = 0
    if not is_before_model:
        place = next(number for number, event in enumerate(events) if isinstance(event, StepStart))
    before = [Alloc(FIRST_OF_BEFORE + number, size) for number, size in enumerate(sizes)]
    frees = [Free(alloc.id) for alloc in before if is_freed]
    if with_workspace_at is not None:
        workspace = next(event for event in events if getattr(event, "id", 0) == WORKSPACE)
        events.remove(workspace)
        before.insert(with_workspace_at, workspace)
    return replace(
        traced, trace=AllocationTrace((*events[:place], *before, *frees, *events[place:]))
    )


def predicted(traced, settings=None, device="NVIDIA A100-SXM4-80GB"):
    return Prediction.of(
        BatchTrace.single(traced),
        find_device(device),
        settings=settings or AllocatorSettings(),
        with_limits=False,
    )


@pytest.fixture(autouse=True, scope="module")
def first_made_lies_lowest():
    """Then what is there before lies as it does where all is replayed from the beginning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "Addresses", AscendingAddresses)
        yield


def segments_at_start(traced, settings=None):
    """What a snapshot of the allocator has before the first step; the addresses of the model."""
    events = traced.trace.events
    place = next(number for number, event in enumerate(events) if isinstance(event, StepStart))
    allocator, blocks = CachingAllocator(settings or AllocatorSettings()), {}
    for event in events[:place]:
        if isinstance(event, Alloc):
            blocks[event.id] = allocator.allocate(event.size_bytes)
        else:
            allocator.free(blocks.pop(event.id))
    found = [
        {
            "device": 0,
            "address": segment[0].address,
            "total_size": sum(block.size_bytes for block in segment),
            "stream": 0,
            "segment_type": "small" if segment[0].pool.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": allocator.settings.expandable_segments,
            "blocks": [
                {
                    "size": block.size_bytes,
                    "requested_size": block.requested_bytes,
                    "state": "active_allocated" if block.is_allocated else "inactive",
                }
                for block in segment
            ],
        }
        for segment in allocator.snapshot()
    ]
    return found, {blocks[number].address for number in (0, 1)}


def at_start(traced, settings=None):
    segments, held = segments_at_start(traced, settings)
    return read_segments(segments, 0, held)


def test_what_another_stream_freed_before_the_first_step_has_left_its_segment_there():
    """As where Lightning wraps a model: DDP's broadcast and its buckets, on a stream of its own."""
    traced = traced_step(16)
    events = list(traced.trace.events)
    place = next(number for number, event in enumerate(events) if isinstance(event, StepStart))
    broadcast = Alloc(FIRST_OF_BEFORE, 36 * MiB, 1)
    buckets = [Alloc(FIRST_OF_BEFORE + 1, 30 * MiB, 1), Alloc(FIRST_OF_BEFORE + 2, 4 * MiB, 1)]
    of_others = (broadcast, Free(broadcast.id), *buckets)
    in_job = predicted(
        replace(traced, trace=AllocationTrace((*events[:place], *of_others, *events[place:])))
    )
    found = at_start(after(traced, [100 * MiB]))
    again = in_job.begun_with(found)
    assert again.at_start
    alone = predicted(traced).begun_with(found)
    assert again.peak_reserved_bytes - alone.peak_reserved_bytes == 36 * MiB


def peaks(one):
    return [
        (window.peak_allocated_bytes, window.peak_reserved_bytes)
        for step in one.steps
        for window in step.windows
    ]


@given(
    sizes=st.lists(st.sampled_from([400 * KiB, 3 * MiB, 7 * MiB, 11 * MiB, 30 * MiB, 70 * MiB])),
    batch_size=st.sampled_from([2, 16, 33]),
)
def test_as_if_what_came_before_were_replayed(sizes, batch_size):
    traced = traced_step(batch_size)
    whole = after(traced, sizes)
    assert peaks(predicted(traced).begun_with(at_start(whole))) == peaks(predicted(whole))


@given(sizes=st.lists(st.sampled_from([400 * KiB, 3 * MiB, 11 * MiB, 30 * MiB]), min_size=1))
def test_a_model_that_lies_in_segments_of_before(sizes):
    traced = traced_step(16)
    whole = after(traced, sizes, is_before_model=True)
    assert peaks(predicted(traced).begun_with(at_start(whole))) == peaks(predicted(whole))


@given(
    sizes=st.lists(st.sampled_from([3 * MiB, 30 * MiB, 70 * MiB]), min_size=1, max_size=6),
    at=st.integers(0, 6),
)
def test_a_workspace_that_is_there_already_is_not_allocated_again(sizes, at):
    traced = with_workspace(traced_step(16))
    whole = after(traced, sizes, with_workspace_at=min(at, len(sizes)))
    found = predicted(traced).begun_with(at_start(whole))
    parts = [part for segment in found.at_start for part in segment.parts]
    assert WORKSPACE in [part.id for part in parts if part.requested_bytes == WORKSPACE_BYTES]
    assert peaks(found) == peaks(predicted(whole))


@pytest.mark.parametrize("is_before_model", [False, True])
@given(sizes=st.lists(st.sampled_from([3 * MiB, 30 * MiB, 70 * MiB]), min_size=1, max_size=6))
def test_expandable_segments(is_before_model, sizes):
    settings = AllocatorSettings(expandable_segments=True)
    traced = traced_step(16)
    whole = after(traced, sizes, is_before_model=is_before_model)
    found = predicted(traced, settings).begun_with(at_start(whole, settings))
    assert peaks(found) == peaks(predicted(whole, settings))


def test_the_prediction_says_so_and_the_history_has_it():
    plain = prediction(16)
    found = plain.begun_with([*MODEL, free_segment(30 * MiB)])
    said = [caveat for caveat in found.caveats if format_bytes(30 * MiB) in caveat]
    assert len(said) == 1
    assert set(found.caveats) - set(plain.caveats) == set(said)
    history = snapshot(found)["segments"]
    last = found.step.windows[-1].end
    assert sum(one["total_size"] for one in history) == last.reserved_bytes
    assert sum(one["allocated_size"] for one in history) == last.allocated_bytes - 16 * KiB
    assert found.timeline().moments[-1].reserved_bytes == found.peak_reserved_bytes


def test_the_largest_batch_sizes_and_other_devices_are_for_a_process_without_them():
    plain = prediction(16, device="RTX 3090")
    found = plain.begun_with([*MODEL, free_segment(10 * GiB)])
    assert found.peak_reserved_bytes > 10 * GiB > plain.peak_reserved_bytes
    assert found.limits == plain.limits
    assert found.at(17).peak_reserved_bytes > 10 * GiB
    assert found.on("RTX 4090").steps[-1].windows == plain.on("RTX 4090").steps[-1].windows


def test_what_does_not_fit_beside_them_fits_after_a_retry():
    plain = prediction(64, device=GiB)
    found = plain.begun_with([*MODEL, *[free_segment(20 * MiB)] * 24])
    assert plain.fits_without_retry
    assert found.fits
    assert not found.fits_without_retry


def test_a_retry_of_the_first_steps_alone_is_not_called_slow():
    plain = prediction(64, device=GiB)
    found = plain.begun_with([*MODEL, *[free_segment(20 * MiB)] * 24])
    assert found.verdict()[0].startswith("Fits, but the allocator must free its cache in the first")
    assert plain.verdict()[0].startswith("Fits. ")


def test_more_than_the_device_has_is_left_out():
    plain = prediction(16, device=GiB)
    assert plain.begun_with([*MODEL, free_segment(4 * GiB)]) is plain


@pytest.mark.parametrize("is_expandable", [False, True])
def test_segments_of_another_kind_than_the_settings_have_are_left_out(is_expandable):
    settings = AllocatorSettings(expandable_segments=not is_expandable)
    plain = predicted(traced_step(16), settings)
    segments = [
        replace(one, is_expandable=is_expandable) for one in (*MODEL, free_segment(12 * MiB))
    ]
    assert plain.begun_with(segments) is plain


def test_a_process_with_the_model_alone_changes_nothing():
    plain = prediction(16)
    assert plain.begun_with(MODEL) is plain
    assert plain.begun_with(()) is plain


def test_memory_of_others_is_not_the_trainings():
    plain = prediction(16)
    others = Segment(False, (Part(30 * MiB, 30 * MiB), Part(10 * MiB)))
    assert plain.begun_with([*MODEL, others]) is plain
    assert plain.begun_with([*MODEL, others, free_segment(30 * MiB)]).at_start[2:] == (
        free_segment(30 * MiB),
    )


@pytest.mark.parametrize("size", [3 * MiB, 9 * MiB])
def test_memory_of_others_beside_the_model_is_taken_and_not_counted(size):
    traced = traced_step(16)
    whole = after(traced, [size], is_freed=False)
    both = predicted(traced).begun_with(at_start(whole)), predicted(whole)
    found, with_others = (list(map(list, zip(*peaks(one), strict=True))) for one in both)
    assert found[1] == with_others[1]
    assert {
        ours + size - theirs for ours, theirs in zip(found[0], with_others[0], strict=True)
    } == {0}


def test_what_the_optimizer_has_and_the_trace_does_not_leaves_the_prediction_as_it_is():
    state = Segment(False, (Part(4 * MiB, 4 * MiB, is_held=True), Part(16 * MiB)))
    plain = prediction(16)
    assert plain.begun_with([*MODEL, state, free_segment(30 * MiB)]) is plain


def test_a_workspace_that_a_later_step_makes_is_made_there():
    traced = traced_step(16)
    events = list(traced.trace.events)
    place = len(events) - 3
    workspace = Alloc(WORKSPACE, WORKSPACE_BYTES, 0, Category.WORKSPACE, "aten::addmm", "")
    late = replace(traced, trace=AllocationTrace((*events[:place], workspace, *events[place:])))
    there = Segment(False, (Part(WORKSPACE_BYTES, WORKSPACE_BYTES),))
    plain = predicted(late)
    found = plain.begun_with([*MODEL, there, free_segment(30 * MiB)])
    assert found.at_start[2:] == (free_segment(30 * MiB),)
    assert found.peak_allocated_bytes == plain.peak_allocated_bytes


def test_what_the_first_step_makes_anew_counts_as_free():
    segments, held = segments_at_start(after(traced_step(16), [3 * MiB], is_freed=False))
    gradient = segments[0]["address"] + 4 * MiB
    found = read_segments(segments, 0, held, {gradient})
    assert found[0].parts == (Part(4 * MiB, 4 * MiB, is_held=True), Part(3 * MiB), Part(13 * MiB))


def test_a_measured_step_that_what_ran_before_explains_raises_no_peak():
    plain = prediction(16, device="RTX 3090")
    found = plain.begun_with([*MODEL, free_segment(10 * GiB)])
    capacity_bytes = plain.device.capacity_bytes
    advice, unexplained = (
        suggest(predicted=one, measured=found.step, capacity_bytes=capacity_bytes)
        for one in (found, plain)
    )
    assert advice.largest == plain.largest_batch_size
    assert unexplained.largest < advice.largest / 10


def test_a_model_that_is_not_there_yet_will_take_them():
    plain = prediction(16)
    assert plain.begun_with([free_segment(30 * MiB)]) is plain
    assert plain.begun_with([MODEL[1], free_segment(30 * MiB)]) is plain


@pytest.mark.parametrize("change", [{"device": 1}, {"stream": 7}, {"segment_pool_id": (0, 1)}])
def test_segments_of_others_do_not_count(change):
    segments, held = segments_at_start(after(traced_step(16), [30 * MiB]))
    found = read_segments(segments, 0, held)
    assert found == (*MODEL, free_segment(30 * MiB))
    segments[-1] |= change
    assert read_segments(segments, 0, held) == MODEL
