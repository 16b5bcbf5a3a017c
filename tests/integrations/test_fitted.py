"""Which size is tried next, and what is said of those that were."""

import pytest
from hand_made import law, prediction

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.fitted import (
    BatchSizeSearch,
    FittedBatchSize,
    LikelyPeak,
    Trial,
    nothing_fits,
)
from memcallback.batch_size.peaks import TracedPeak
from memcallback.core.types import Category
from memcallback.core.units import GiB, MiB


def search(first, limit, *, expect=lambda size: None, cap=None, multiple_of=1):
    """The sizes tried where those up to a limit fit."""
    looking, tried = (
        BatchSizeSearch(first, BatchSizeBounds(multiple_of=multiple_of, max_batch_size=cap)),
        [],
    )
    while looking.next is not None:
        size = looking.next
        tried.append(size)
        looking.record(size, fits=size <= limit, expected=expect(size))
    return looking.best, tried


def test_a_prediction_that_holds_takes_one_trial():
    assert search(1234, 1240, expect=lambda size: 1234) == (1234, [1234])


def test_after_an_error_the_middle_is_tried_and_what_is_expected_then():
    # At 617 the measured peak tells of 990.
    assert search(
        1234, 1000, expect=lambda size: 990 if size == 617 else None if size == 1234 else size
    ) == (990, [1234, 617, 990])


def test_a_peak_above_the_budget_corrects_the_size_downwards():
    assert search(1234, 1200, expect=lambda size: 1190) == (1190, [1234, 1190])


def test_a_peak_far_below_the_prediction_corrects_it_upwards():
    assert search(100, 1000, expect=lambda size: 150) == (150, [100, 150])


def test_a_little_more_is_not_worth_a_trial():
    assert search(1000, 2000, expect=lambda size: 1049) == (1000, [1000])
    assert search(1000, 2000, expect=lambda size: 1050) == (1050, [1000, 1050])


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 100, 511, 1000])
def test_without_anything_expected_the_middle_finds_the_limit(limit):
    best, tried = search(1000, limit)
    assert best <= limit < max(best + 1, best * 1.05)
    assert len(tried) <= 20
    assert len(set(tried)) == len(tried)


def test_an_expectation_that_a_trial_has_refuted_is_not_followed():
    best, tried = search(1000, 700, expect=lambda size: 1000)
    assert 700 / 1.05 <= best <= 700
    assert tried.count(1000) == 1


def test_where_nothing_fits_one_sample_is_tried_last():
    assert search(8, 0) == (0, [8, 4, 2, 1])
    assert search(8, 0, expect=lambda size: 0) == (0, [8, 4, 2, 1])


def test_no_size_is_tried_above_the_cap():
    assert search(1000, 10_000, expect=lambda size: 5000, cap=60) == (60, [60])
    assert search(10, 10_000, expect=lambda size: 5000, cap=60) == (60, [10, 60])


def test_every_size_that_is_tried_is_a_multiple_where_so_many_fit():
    assert search(1234, 5000, expect=lambda size: 1234, multiple_of=8) == (1232, [1232])
    best, tried = search(1000, 700, multiple_of=8)
    assert 700 / 1.05 - 8 < best <= 700
    assert all(size % 8 == 0 for size in tried)
    assert search(40, 3, multiple_of=8) == (3, [40, 16, 8, 4, 2, 3])


def trial(size, peak, **options):
    return Trial(
        batch_size=size,
        peak_bytes=peak,
        predicted_bytes=900 * MiB,
        budget_bytes=1000 * MiB,
        **options,
    )


def fitted(*trials, **options):
    defaults = {
        "batch_size": trials[-1].batch_size,
        "previous_batch_size": 32,
        "predicted_batch_size": 1234,
        "device_name": "Tesla T4",
        "capacity_bytes": 1600 * MiB,
        "outside_bytes": 512 * MiB,
        "headroom": 0.05,
        "counts": "reserved",
        "num_updates": 3,
        "has_validation": True,
    }
    return FittedBatchSize(trials=trials, **(defaults | options))


def test_a_trial_fits_within_its_budget_without_an_error_or_a_retry():
    assert trial(8, 1000 * MiB).fits
    assert trial(8, None).fits
    assert not trial(8, 1000 * MiB + 1).fits
    assert not trial(8, 10, num_alloc_retries=1).fits
    assert not trial(8, 10, is_out_of_memory=True).fits


def test_the_text_says_what_was_tried_and_why_it_was_corrected():
    found = fitted(
        trial(1234, 990 * MiB, is_out_of_memory=True),
        trial(617, 500 * MiB),
        trial(1100, 950 * MiB),
        notes=("A note.",),
    )
    text = found.to_text()
    assert " ".join(text.split()).startswith(
        "Batch size 1,100 (it was 32) is the largest found to fit Tesla T4. It ran 3 optimizer "
        "updates and validation. Limit: 1000.00 MiB, which is 1.56 GiB minus 2.5 % (half of the "
        "headroom) minus 512.00 MiB used outside the allocator."
    )
    assert (
        "Batch size 1,234 ran out of memory, and the error was caught: 617 was tried next." in text
    )
    assert "Batch size 617 took 500.00 MiB and left room: 1,100 was tried next." in text
    assert text.endswith("A note.\n")
    assert found.num_ooms == 1
    firsts = [row.split()[0] for row in text.splitlines() if row.split()]
    assert [first for first in firsts if first[0].isdigit()] == ["1,234", "617", "1,100"]


def test_the_data_has_every_trial():
    found = fitted(trial(1234, 1010 * MiB), trial(1190, 980 * MiB), has_validation=False).to_dict()
    assert found["batch_size"] == 1190
    assert found["headroom_pct"] == 5.0
    assert "headroom" not in found
    assert [one["fits"] for one in found["trials"]] == [False, True]
    assert found["corrections"] == [
        "Batch size 1,234 took 1010.00 MiB (900.00 MiB were predicted), more than the 1000.00 MiB "
        "that may be used: 1,190 was tried next."
    ]


def test_a_miss_of_the_prediction_has_its_reason():
    trials = trial(472, 1310 * MiB), trial(352, 980 * MiB)
    (said,) = fitted(*trials, counts="allocated", has_validation=False).corrections
    assert (
        "(900.00 MiB were predicted; not predicted: scratch memory inside operators on a CPU)"
        in said
    )
    (said,) = fitted(*trials).corrections
    assert "(900.00 MiB were predicted; not predicted: validation)" in said
    (said,) = fitted(trial(472, 905 * MiB, num_alloc_retries=1), trials[1]).corrections
    assert "predicted" not in said


def test_a_prediction_that_a_trial_has_corrected_is_called_so():
    rows = fitted(trial(472, 1010 * MiB), trial(352, 980 * MiB)).to_text().splitlines()
    assert next(row for row in rows if row.startswith(" 472 ")).count("corrected") == 0
    assert next(row for row in rows if row.startswith(" 352 ")).count("900.00 MiB corrected") == 1


def test_there_is_one_budget_on_screen():
    text = fitted(trial(1234, 1010 * MiB), trial(1190, 980 * MiB), headroom=0.0).to_text()
    limit = "Limit: 1000.00 MiB, which is 1.56 GiB minus 512.00 MiB used outside the allocator."
    assert limit in " ".join(text.split())
    assert "more than the 1000.00 MiB that may be used" in " ".join(text.split())


def test_one_trial_has_no_corrections():
    assert fitted(trial(1234, 900 * MiB)).corrections == ()


def tried(peak_bytes, *, batch_size=16, budget_bytes=GiB, **changes):
    return Trial(
        batch_size=batch_size,
        peak_bytes=peak_bytes,
        predicted_bytes=None,
        budget_bytes=budget_bytes,
        **changes,
    )


def test_what_a_trial_took_more_grows_with_the_batch_and_may_be_less():
    line = TracedPeak.of(prediction(16))
    before = LikelyPeak(line=line, fixed_bytes=1000)
    assert before.at(16) == line.at(16) + 1000
    after = before.after(tried(line.at(16) + 1000 + 160))
    assert after.at(16) == line.at(16) + 1160
    assert after.at(32) == line.at(32) + 1320
    assert after.at(8) == line.at(8) + 1080
    less = before.after(tried(line.at(16)))
    assert less.at(32) == line.at(32) - 1000


def test_the_largest_expected_size_is_the_last_within_the_budget():
    line = TracedPeak.of(prediction(16))
    likely = LikelyPeak(line=line)
    largest = likely.largest_within(GiB)
    assert likely.at(largest) <= GiB < likely.at(largest + 1)
    corrected = likely.after(tried(line.at(16) + 16 * MiB))
    assert corrected.largest_within(GiB) < largest


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (tried(5, is_out_of_memory=True, num_alloc_retries=3), "out of memory"),
        (tried(5, num_alloc_retries=1), "the allocator had to give back its cache and try again"),
        (tried(None), "ran; its peak could not be read"),
        (tried(GiB), "fits"),
        (tried(GiB + 1), "more than the 1024.00 MiB that may be used"),
    ],
)
def test_what_came_of_a_trial_is_told(trial, said):
    assert trial.outcome == said


def test_where_nothing_fits_the_larger_part_of_one_sample_says_what_would_help():
    few = tried(2 * GiB, batch_size=1)
    text = nothing_fits(few, "a card", 4 * GiB, None)
    assert text == (
        "No batch size fits a card: 1 is the smallest that was tried. It takes 2.00 GiB, and "
        "1024.00 MiB may be used of 4.00 GiB. A smaller model, a precision of 16 bits or "
        "recomputing activations (torch.utils.checkpoint) takes less."
    )
    failed = nothing_fits(tried(None, is_out_of_memory=True), "a card", 4 * GiB, None)
    assert "It ran out of memory, with 1024.00 MiB to use of 4.00 GiB." in failed
    # Weights, buffers, gradients and state of 4,010 B.
    held = nothing_fits(few, "a card", 4 * GiB, law(batch_size=50))
    assert "parameters, gradients and optimizer state are 3.92 KiB:" in held
    light = law(batch_size=50, held={Category.PARAMETER: 100, Category.GRADIENT: 0})
    rest = nothing_fits(few, "a card", 4 * GiB, light)
    # An input of 5, 420 kept, 400 of outputs.
    assert "activations and temporary memory of one sample are 825 bytes:" in rest
