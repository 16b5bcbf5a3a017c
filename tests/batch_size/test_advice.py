"""What bounds a batch size besides memory, and how an effective batch size is had."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from memcallback.batch_size.accumulation_plan import AccumulationPlan
from memcallback.batch_size.advice import RankBatchSize
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


def test_a_multiple_is_named_where_one_was_asked_for_and_reached():
    assert "Suggested: 50, a multiple of 2, 5.00x" in advice(51, multiple_of=2).sentence()
    assert "Suggested:" not in advice(51, multiple_of=1).sentence()


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


def lines_of(advised, **changes):
    return str(replace(advised, **changes)).splitlines()


def test_a_size_that_fits_again_above_the_limit_is_told():
    said = (
        "49 samples do not fit, but 60 do: at some batch sizes, blocks fill the gaps in the "
        "allocator's memory better than at others."
    )
    told, untold = (
        " ".join(" ".join(lines_of(advice(40), limit=48, limit_without_retry=40, **again)).split())
        for again in ({"limit_fits_again": 60}, {})
    )
    assert said in told
    assert said not in untold


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"world_size": 4}, "4 ranks: 384 samples in total."),
        ({"num_microbatches": 2}, "2 microbatches of that size: 192 samples in total."),
    ],
)
def test_the_samples_of_all_batches_are_told_where_there_are_several(bounds, said):
    assert said in lines_of(advice(100, **bounds))
    assert not any("in total" in line for line in lines_of(advice(100)))


def test_ranks_of_several_kinds_are_told_one_by_one_or_by_the_first_and_last():
    kinds = (
        RankBatchSize(ranks=(0,), device_name="T4", batch_size=1000),
        RankBatchSize(ranks=(1, 2), device_name="L4", batch_size=20),
        RankBatchSize(ranks=tuple(range(3, 11)), device_name="A10", batch_size=3),
        RankBatchSize(ranks=tuple(range(11, 20)), device_name="B200", batch_size=0),
    )
    assert [line for line in lines_of(advice(40), by_rank=kinds) if line[:4].lower() == "rank"] == [
        "Rank 0 on T4: batch size 1,000",
        "Ranks 1, 2 on L4: batch size 20",
        "Ranks 3, 4, 5, 6, 7, 8, 9, 10 on A10: batch size 3",
    ]
    assert "9 ranks, 11 to 19, on B200: batch size 0" in lines_of(advice(40), by_rank=kinds)
    assert replace(advice(40), by_rank=kinds).to_dict()["by_rank"][1] == {
        "ranks": [1, 2],
        "device_name": "L4",
        "batch_size": 20,
    }


def test_lengths_of_sequences_are_told_with_their_batch_sizes():
    advised = replace(advice(40), by_sequence_length={128: 40, 4096: 1})
    assert [line for line in lines_of(advised) if line.startswith("Sequences")] == [
        "Sequences of length 128: batch size 40",
        "Sequences of length 4096: batch size 1",
    ]


def test_without_replays_every_size_up_to_the_largest_fits():
    advised = replace(advice(40), fits_at=None)
    assert [advised.fits(size) for size in (1, 40, 41)] == [True, True, False]
    assert not replace(advised, fits_at=lambda size: size == 7).fits(8)
    assert replace(advised, fits_at=lambda size: size == 7).fits(7)


@pytest.mark.parametrize(("largest", "said"), [(9, "2.00x"), (40, "10x"), (88, "22x")])
def test_how_many_times_the_current_size_it_is_has_few_digits(largest, said):
    small = replace(advice(largest), current_batch_size=4)
    assert small.multiple == small.batch_size / 4
    assert f"{said} the current 4" in small.sentence()


def test_the_table_marks_the_sizes_that_the_text_names():
    advised = replace(
        advice(40),
        limit=64,
        limit_without_retry=48,
        limit_without_retry_peak_bytes=48 * MiB,
    )
    marks = {row[0]: row[2] for row in advised.to_table().rows}
    assert marks["40"] == "suggested"
    assert marks["48"] == "limit without a retry"
    assert marks["64"] == "limit"
    assert marks["10"] == "current"
    assert marks["1"] == ""
    same = replace(advised, current_batch_size=40)
    assert {row[0]: row[2] for row in same.to_table().rows}["40"] == "suggested, current"
    unknown = replace(advised, limit_without_retry_peak_bytes=None)
    assert "48" not in {row[0] for row in unknown.to_table().rows}


def test_the_curve_reaches_twice_the_larger_of_suggestion_and_current_size():
    assert [size for size, _ in advice(100).curve] == [1, 2, 4, 8, 10, 16, 32, 64, 96, 128]
    assert [size for size, _ in advice(3).curve] == [1, 2, 3, 4, 8, 10, 16]


def test_outside_memory_and_headroom_are_taken_off_what_may_be_used():
    advised = replace(advice(40), outside_bytes=100 * MiB, headroom=0.25)
    assert advised.budget_bytes == 668 * MiB
    assert replace(advised, outside_bytes=None).budget_bytes == 768 * MiB


def test_a_pipeline_accumulates_over_its_microbatches():
    with pytest.raises(
        ValueError, match=r"in a pipeline: .* here 2\. Ask again with another Ranks"
    ):
        advice(100, num_microbatches=2).accumulate_for(8)
    with pytest.raises(ValueError, match=r"of 4, the number of ranks, got 1\. The nearest"):
        advice(100, world_size=4).accumulate_for(1)


def test_accumulation_goes_around_sizes_that_do_not_fit():
    advised = replace(advice(40), fits_at=lambda size: size <= 2)
    assert advised.accumulate_for(12) == AccumulationPlan(batch_size=2, accumulate=6)
    none = replace(advice(40), fits_at=lambda size: False)
    with pytest.raises(ValueError, match="no batch size that divides it fits"):
        none.accumulate_for(12)


def test_a_pipeline_needs_a_sample_for_each_microbatch():
    with pytest.raises(
        ValueError,
        match="at least 8, got 7 samples for 4 ranks with 2 microbatches: each needs one",
    ):
        BatchSizeBounds(dataset_size=7, world_size=4, num_microbatches=2)
    with pytest.raises(ValueError, match="got 3 samples for 4 ranks: each"):
        BatchSizeBounds(dataset_size=3, world_size=4)
    assert BatchSizeBounds(dataset_size=8, world_size=4, num_microbatches=2).share_of_dataset == 1
    with pytest.raises(ValueError, match=r"num_microbatches must be at least 1, got 0\. Give 1"):
        BatchSizeBounds(num_microbatches=0)


def test_a_size_is_the_largest_multiple_that_fits_else_the_largest_that_fits():
    bounds = BatchSizeBounds()
    assert bounds.within(20) == 16
    assert bounds.within(20, lambda size: size < 16) == 8
    assert bounds.within(20, lambda size: size < 8) == 20  # it is known to fit
    assert bounds.within(7) == 7
    assert bounds.within(0) == 0
    limited = BatchSizeBounds(max_batch_size=6)
    assert limited.within(20, lambda size: size < 2) == 1
    assert limited.within(20, lambda size: False) == 0
    assert limited.within(20, lambda size: size == 6) == 6


def test_where_no_multiple_nearby_fits_a_few_sizes_are_tried():
    tried = []

    def fits(size):
        tried.append(size)
        return size < 1_000_000 or size % 8 != 0

    assert BatchSizeBounds(multiple_of=8).within(50_000_001, fits) == 999_992
    assert len(tried) < 150


def test_a_loader_bounds_by_its_dataset_and_one_of_unknown_length_by_nothing():
    for loader in (
        DataLoader(range(12), batch_size=3),
        DataLoader(range(12), batch_sampler=[[0, 1], [2, 3]]),
        SimpleNamespace(dataset=range(12), batch_size=3),
    ):
        bounds = BatchSizeBounds.of_loader(loader, 4)
        assert bounds == BatchSizeBounds(dataset_size=12, world_size=4)
        assert BatchSizeBounds.of_loader(loader, 13) == BatchSizeBounds()
    assert BatchSizeBounds.of_loader(object(), 1) == BatchSizeBounds()


def test_a_loader_of_ready_batches_bounds_by_nothing():
    batches = [torch.zeros(32, 64) for _ in range(40)]
    assert BatchSizeBounds.of_loader(DataLoader(batches, batch_size=None), 1) == BatchSizeBounds()


def test_a_dataset_that_is_smaller_than_a_batch_has_no_samples_for_items_and_bounds_by_nothing():
    bounds = BatchSizeBounds(dataset_size=40, max_batch_size=100)
    assert bounds.beside(40) == bounds.beside(None) == bounds
    assert bounds.beside(41) == BatchSizeBounds(max_batch_size=100)
    # A sampler gives each of 4 ranks as many samples, and one of them twice.
    of_ranks = BatchSizeBounds(dataset_size=39, world_size=4)
    assert of_ranks.beside(10) == of_ranks
    assert of_ranks.beside(11) == BatchSizeBounds(world_size=4)
