"""The steady step: a trace's last window, repeated until the allocator has settled, is what a
longer trace would show.
"""

from dataclasses import replace

import pytest
from hand_made import prediction
from hypothesis import given, settings
from hypothesis import strategies as st

from memcallback.core.allocation_trace import (
    Alloc,
    AllocationTrace,
    Free,
    PhaseEnd,
    PhaseStart,
    StepEnd,
    StepStart,
)
from memcallback.core.types import Category, Phase, Stage
from memcallback.core.units import KiB, MiB
from memcallback.devices.catalogue import find_device
from memcallback.prediction.allocator.caching import CachingAllocator
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.prediction import Prediction
from memcallback.prediction.replay import replay
from memcallback.prediction.steady_state import (
    MAX_WINDOWS,
    Window,
    last_windows,
    pairs_of,
    unsettled,
)
from memcallback.trace.traced_step import TracedStep

#: One allocation of a window: its size, where it begins and ends of 100 moments, and whether it
#: ends in the next window.
SLOTS = st.tuples(
    st.sampled_from([0, 100, 3 * KiB, 700 * KiB, MiB + 512, 3 * MiB, 11 * MiB, 13 * MiB, 20 * MiB])
    | st.integers(1, 30 * MiB),
    st.integers(0, 99),
    st.integers(0, 99),
    st.booleans(),
)
PROGRAMS = st.lists(SLOTS, min_size=1, max_size=25)


def unrolled(slots, num_windows, *, num_steps=1, growth_bytes=0, leaks=()):
    """The trace of a program that repeats: a model and state of the first window besides."""
    ids = iter(range(1_000_000))
    events = [Alloc(next(ids), 2 * MiB, 0, Category.PARAMETER)]
    left = {}
    for window in range(num_windows):
        moments = {}
        for slot, (size, start, end, survives) in enumerate(slots):
            is_later = survives or end <= start
            moments.setdefault(start, []).append(("alloc", slot, size, is_later))
            moments.setdefault(end, []).insert(0, ("next" if is_later else "free", slot))
        mine = {}
        marks = {
            0: [StepStart(), PhaseStart(Phase.FORWARD)],
            99: [PhaseEnd(Phase.OPTIMIZER_STEP), StepEnd()],
        }
        marks[30] = [PhaseEnd(Phase.FORWARD), PhaseStart(Phase.BACKWARD)]
        marks[70] = [PhaseEnd(Phase.BACKWARD), PhaseStart(Phase.OPTIMIZER_STEP)]
        if num_steps == 2:
            marks[30] = [
                PhaseEnd(Phase.FORWARD),
                StepEnd(),
                StepStart(),
                PhaseStart(Phase.BACKWARD),
            ]
        for moment in range(100):
            if moment != 99:
                events += marks.get(moment, ())
            for action, slot, *about in sorted(
                moments.get(moment, ()), key=lambda entry: entry[0] == "alloc"
            ):
                if action == "alloc":
                    made = Alloc(
                        next(ids),
                        about[0],
                        0,
                        Category.GRADIENT if about[1] else Category.TEMPORARY,
                        f"operator {slot}",
                    )
                    events.append(made)
                    mine[slot] = made.id
                elif action == "free":
                    events.append(Free(mine.pop(slot)))
                elif slot in left:
                    events.append(Free(left.pop(slot)))
            if moment == 50 and (window == 0 or growth_bytes):
                size = growth_bytes if window else 4 * MiB
                events.append(Alloc(next(ids), size, 0, Category.OPTIMIZER_STATE))
        events += marks[99]
        left = mine
    return AllocationTrace(tuple(events))


def replayed(trace, capacity_bytes=None):
    return replay(
        trace.events,
        CachingAllocator(AllocatorSettings(), capacity_bytes=capacity_bytes),
        unlimited=capacity_bytes is None,
    )


def without_counts(step):
    """A step without what is counted since the program began."""
    return [
        replace(
            w,
            start=replace(w.start, num_alloc_retries=None, num_ooms=None),
            end=replace(w.end, num_alloc_retries=None, num_ooms=None),
        )
        for w in step.windows
    ]


def settled(steps, num_steps=1):
    """The first window from the third on that is as the one before it; else the last."""
    windows = [
        [without_counts(step) for step in steps[n : n + num_steps]]
        for n in range(0, len(steps), num_steps)
    ]
    return next(
        (windows[n] for n in range(2, len(windows)) if windows[n] == windows[n - 1]), windows[-1]
    )


@settings(max_examples=50)
@given(slots=PROGRAMS)
def test_after_a_batch_of_another_size_as_many_windows_are_repeated(slots):
    events = list(unrolled(slots, 5).events)
    third = [position for position, event in enumerate(events) if event == StepStart()][2]
    events[third] = StepStart(batch_size=5)
    ours = replayed(AllocationTrace(tuple(events)))
    later = replayed(unrolled(slots, 3 + MAX_WINDOWS)).steps[3:]
    assert [without_counts(step) for step in ours.steps[4:]] == settled(later)
    assert [step.batch_size for step in ours.steps] == [None, None, 5, None, None]


@settings(max_examples=150)
@given(slots=PROGRAMS, num_steps=st.sampled_from([1, 2]), capacity=st.none() | st.integers(50, 300))
def test_a_repeated_window_is_that_of_a_longer_trace(slots, num_steps, capacity):
    short, long = (
        unrolled(slots, 2, num_steps=num_steps),
        unrolled(slots, MAX_WINDOWS, num_steps=num_steps),
    )
    capacity_bytes = capacity and capacity * MiB
    ours, theirs = replayed(short, capacity_bytes), replayed(long, capacity_bytes)
    if theirs.out_of_memory is None:
        assert [without_counts(step) for step in ours.steps[num_steps:]] == settled(
            theirs.steps, num_steps
        )
        assert [step.is_warm_up for step in ours.steps] == [True] * num_steps + [False] * num_steps
        assert ours.steps[:num_steps] == theirs.steps[:num_steps]
        assert ours.num_alloc_retries <= theirs.num_alloc_retries
    elif ours.out_of_memory is not None:
        assert ours.out_of_memory == theirs.out_of_memory


@settings(max_examples=100)
@given(slots=PROGRAMS)
def test_what_stands_at_the_peak_adds_up_to_that_of_the_settled_step(slots):
    predicted = Prediction.of(
        BatchTrace.single(TracedStep(unrolled(slots, 2), 1)),
        find_device("B200"),
        settings=AllocatorSettings(),
    )
    assert (
        sum(standing.block_bytes for standing in predicted.at_peak)
        == predicted.peak_allocated_bytes
    )


@settings(max_examples=30)
@given(slots=PROGRAMS, growth_bytes=st.integers(1, 3 * MiB))
def test_memory_that_grows_is_not_repeated_and_said(slots, growth_bytes):
    growing = replayed(unrolled(slots, 2, growth_bytes=growth_bytes))
    assert (
        growing.steps == replayed(unrolled(slots, MAX_WINDOWS, growth_bytes=growth_bytes)).steps[:2]
    )
    (caveat,) = growing.caveats
    assert caveat.startswith("Update 2 frees ")
    assert " that it allocated itself. So memory changes from update to update. " in caveat


def test_what_is_left_in_other_pieces_is_not_repeated_and_needs_no_word():
    freed, left = Alloc(1, 10), Alloc(2, 10, operator="aten::clone")
    events = (StepStart(), freed, StepEnd(), StepStart(), Free(1), left, StepEnd())
    result = replayed(AllocationTrace(events))
    assert len(result.steps) == 2
    assert result.caveats == ()
    assert pairs_of([freed], [left]) is None


def test_storages_pair_by_kind_and_in_their_order():
    freed = [Alloc(1, 10, operator="a"), Alloc(2, 10, operator="b"), Alloc(3, 10, operator="a")]
    left = [Alloc(4, 10, operator="a"), Alloc(5, 10, operator="a"), Alloc(6, 10, operator="b")]
    assert dict(pairs_of(freed, left)) == {1: 4, 3: 5, 2: 6}
    assert pairs_of(freed, left[:2]) is None


def count_phases(monkeypatch):
    counted, reset_peaks = [], CachingAllocator.reset_peaks
    monkeypatch.setattr(
        CachingAllocator, "reset_peaks", lambda self: (counted.append(1), reset_peaks(self))
    )
    return counted


def test_it_stops_when_it_has_settled(monkeypatch):
    counted = count_phases(monkeypatch)
    assert prediction(16, with_limits=False).fits
    assert len(counted) == 3 * 3


def test_where_it_does_not_settle_the_spread_of_the_peaks_is_said():
    slots = [
        (10 * MiB, 48, 72, False),
        (MiB + 512, 17, 77, True),
        (10_256_384, 0, 48, True),
        (10 * MiB, 78, 69, True),
    ]
    result = replayed(unrolled(slots, 2))
    assert result.caveats == (
        "The allocator does not settle: in updates 3 to 6 peak allocated is 38.00 MiB to 39.00 "
        "MiB, peak reserved 50.00 MiB. The values shown are those of update 6.",
    )
    assert result.steps[-1].windows == replayed(unrolled(slots, MAX_WINDOWS)).steps[-1].windows
    traced = BatchTrace.single(TracedStep(unrolled(slots, 2), 1))
    assert (
        result.caveats[0]
        in Prediction.of(traced, find_device("T4"), settings=AllocatorSettings()).caveats
    )


def test_a_spread_that_no_digit_shows_is_not_said():
    window = Window(0, 4, 2, 2, Stage.TRAINING)
    peaks = [(100 * MiB, 200 * MiB), (100 * MiB + 512, 200 * MiB)]
    assert unsettled(window, peaks) == ()
    assert len(unsettled(window, [*peaks, (101 * MiB, 200 * MiB)])) == 1


def test_windows_are_the_steps_up_to_an_update():
    steps = (StepStart(), PhaseStart(Phase.BACKWARD), PhaseEnd(Phase.BACKWARD), StepEnd())
    update = (
        StepStart(),
        PhaseStart(Phase.OPTIMIZER_STEP),
        PhaseEnd(Phase.OPTIMIZER_STEP),
        StepEnd(),
    )
    assert last_windows((*steps, *update, Alloc(0, 1), *steps, *update, Free(0))) == [
        (8, 17, 2, 2, Stage.TRAINING)
    ]
    assert last_windows(steps * 3) == [(8, 12, 3, 3, Stage.TRAINING)]
    assert last_windows(steps) == []
    assert last_windows((*update, *update, *steps)) == []
    assert last_windows(()) == []


def test_memory_can_run_out_in_a_repetition():
    slots = [(3 * MiB, 85, 92, True), (11 * MiB, 42, 56, True)]
    result = replayed(unrolled(slots, 2), 32 * MiB)
    assert result.out_of_memory.startswith(
        "step 3, backward, operator 1 in the root module: Tried to allocate 12.00 MiB of a "
        "capacity of 32"
    )
    assert result.num_alloc_retries == 1
    assert result.out_of_memory == replayed(unrolled(slots, MAX_WINDOWS), 32 * MiB).out_of_memory


@pytest.mark.parametrize(
    ("category", "is_told"), [(Category.WORKSPACE, True), (Category.ACTIVATION, False)]
)
def test_a_convolution_without_room_for_its_workspace_is_told_to_have_another_way(
    category, is_told
):
    too_large = Alloc(1, 64 * MiB, category=category, operator="aten::convolution_backward")
    events = [StepStart(), PhaseStart(Phase.BACKWARD), too_large]
    events += [Free(1), PhaseEnd(Phase.BACKWARD), StepEnd()]
    said = replay(events, CachingAllocator(capacity_bytes=32 * MiB)).out_of_memory
    assert ("tries a slower algorithm of cuDNN" in said) is is_told
