"""What bounds a batch size besides memory, and how an effective batch size is had."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcallback.batch_size.advice import AccumulationPlan
from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import Estimate
from memcallback.batch_size.peaks import PeakLine
from memcallback.core.units import GiB, MiB


def advice(largest, **bounds):
    line = PeakLine(
        batch_size=10, peak_bytes=10 * MiB, growth_bytes=MiB, decline_bytes=MiB, floor_bytes=0
    )
    return Estimate(
        peaks=line,
        largest=largest,
        counts="reserved",
        bounds=BatchSizeBounds(**bounds),
        capacity_bytes=GiB,
        outside_bytes=0,
        headroom=0.0,
        is_measured=False,
        basis="predicted by hand",
        leaves_out=(),
    ).advice()


@pytest.mark.parametrize(
    ("largest", "bounds", "batch_size"),
    [
        (100, {}, 96),
        (100, {"multiple_of": 1}, 100),
        (7, {}, 7),
        (0, {}, 0),
        (100, {"max_batch_size": 50}, 48),
        (100, {"dataset_size": 60}, 56),
        (100, {"dataset_size": 60, "world_size": 4}, 8),
        (100, {"dataset_size": 12, "world_size": 4}, 3),
        (3, {"max_batch_size": 50, "dataset_size": 60}, 3),
    ],
)
def test_the_suggestion_stays_within_its_bounds(largest, bounds, batch_size):
    assert advice(largest, **bounds).batch_size == batch_size


def test_the_batches_of_all_ranks_are_one():
    assert advice(100, world_size=4).global_batch_size == 384


def test_the_sentence_says_what_bounded_it():
    assert (
        "Largest batch size: 50 (max_batch_size) with 0 % of 1024.00 MiB kept free. 100 would fit. "
        "Suggested: 48, a multiple of 8, 4.80x the current 10."
    ) in advice(100, max_batch_size=50).sentence()
    assert "Largest batch size: 60 (all samples of the dataset) with" in (
        advice(100, dataset_size=60).sentence()
    )
    assert "Largest batch size: 15 (the dataset has 60 samples) with" in (
        advice(100, dataset_size=60, world_size=4).sentence()
    )
    assert (
        "Largest batch size: 96 with 0 % of 1024.00 MiB kept free. That is 9.60x the current 10."
    ) in advice(96).sentence()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((48, 48), "With nothing kept free, 48 fit."),
        ((48, 51), "With nothing kept free, 48 fit without a retry, 51 with retries."),
        ((48, None), "With nothing kept free, 48 fit without a retry."),
        ((1, 1), "With nothing kept free, 1 fits."),
        ((0, 0), "With nothing kept free, not even one sample fits."),
    ],
)
def test_equal_limits_are_said_once(limits, said):
    without_retry, limit = limits
    whole = replace(advice(40), limit=limit, limit_without_retry=without_retry)
    assert said in str(whole).splitlines()


def test_a_dataset_that_fits_is_all_that_is_suggested():
    assert advice(100, dataset_size=60).has_whole_dataset
    assert advice(100, dataset_size=60).largest_in_bounds == 60
    assert not advice(40, dataset_size=60).has_whole_dataset
    assert not advice(100, dataset_size=60, max_batch_size=50).has_whole_dataset
    assert not advice(100).has_whole_dataset


@pytest.mark.parametrize(
    ("bounds", "match"),
    [
        ({"multiple_of": 0}, "multiple_of must be at least 1, got 0"),
        ({"max_batch_size": -1}, "max_batch_size must be at least 1, got -1"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"dataset_size": 3, "world_size": 4}, "got 3 samples for 4 ranks"),
    ],
)
def test_bounds_out_of_range_are_refused(bounds, match):
    with pytest.raises(ValueError, match=match):
        BatchSizeBounds(**bounds)


@given(st.integers(1, 300), st.integers(1, 2000), st.integers(1, 8))
def test_accumulation_keeps_the_product_exact_and_fits(largest, of_rank, world_size):
    suggested = advice(largest, world_size=world_size)
    found = suggested.accumulate_for(of_rank * world_size)
    assert found.effective_batch_size == of_rank * world_size
    assert 1 <= found.batch_size <= suggested.batch_size
    larger = range(found.batch_size + 1, min(suggested.batch_size, of_rank) + 1)
    assert all(of_rank % size for size in larger)


def test_accumulation_for_an_effective_batch_size():
    assert advice(100).accumulate_for(256) == AccumulationPlan(batch_size=64, accumulate=4)
    assert advice(100, world_size=2).accumulate_for(256) == AccumulationPlan(
        batch_size=64, accumulate=2, world_size=2
    )


def test_what_cannot_be_accumulated_is_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"multiple of 4, the number of ranks, got 258\. The nearest is 256"
    ):
        advice(100, world_size=4).accumulate_for(258)
    with pytest.raises(ValueError, match="effective_batch_size must be at least 1, got 0"):
        advice(100).accumulate_for(0)
    with pytest.raises(ValueError, match="No batch size is sure to fit"):
        advice(0).accumulate_for(8)


def test_the_curve_has_the_current_and_the_suggested_size():
    curve = dict(advice(100).curve)
    assert curve[10] == 10 * MiB
    assert curve[96] == 96 * MiB
    assert max(curve) == 128


def test_the_limit_of_a_straight_line_is_the_capacity():
    assert advice(100).limit_without_retry == 1024
    assert advice(100).limit is None


def test_as_data_every_size_has_its_unit():
    data = json.loads(json.dumps(advice(100).to_dict()))
    assert data["batch_size"] == 96
    assert data["largest_batch_size"] == 100
    assert {"batch_size": 10, "peak_bytes": 10 * MiB} in data["curve"]
