"""The short report on the console, and the lines at the end."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import law
from hand_made import prediction as traced

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.batch_size.estimate import suggest
from memcallback.core.step_memory import DeviceMemory
from memcallback.core.types import Category, Kind, Phase
from memcallback.core.units import GiB, MiB, brief_bytes
from memcallback.prediction.textbook.law import LinearBytes
from memcallback.report.brief import brief_report
from memcallback.report.closing import Ending, closing_lines
from memcallback.report.console import Console
from memcallback.report.rank_values import RankPoint, RankValues
from memcallback.report.report import Report, Setup
from memcallback.report.styled import Letters, letters_here, plain
from memcallback.savings.plan import Plan, PlanRow, SavingGroup

GOLDEN = Path(__file__).parents[1] / "golden"
SETUP = Setup(model="Net", optimizer="Adam", precision="bf16-mixed")


def as_measured(step, *, more_in_backward=0, **changes):
    """A predicted step as one that was measured, with a higher peak in its backward pass."""
    windows = tuple(
        replace(window, peak_allocated_bytes=window.peak_allocated_bytes + more_in_backward)
        if window.phase is Phase.BACKWARD
        else window
        for window in step.windows
    )
    source = "CUDA caching allocator"
    return replace(
        step, kind=Kind.MEASURED, source=source, windows=windows, **({"index": 1} | changes)
    )


def suggested(bounds):
    """Advice for a step on a device of 1 GiB."""
    predicted = traced(16)
    return suggest(
        measured=as_measured(predicted.step), predicted=predicted, capacity_bytes=GiB, bounds=bounds
    )


def report(**changes):
    predicted = changes.get("prediction", traced(16))
    step = as_measured(predicted.step)
    device = DeviceMemory(capacity_bytes=GiB, used_bytes=256 * MiB, reserved_bytes=58 * MiB)
    advice = suggest(measured=step, predicted=predicted, capacity_bytes=GiB)
    figures = {
        "measured": step,
        "prediction": predicted,
        "device": device,
        "advice": advice,
        "setup": SETUP,
    }
    return Report(**(figures | changes))


def text_of(made, **options):
    return plain(brief_report(made, Letters(), **options))


def line_with(text, word):
    return next(line for line in text.splitlines() if word in line)


def plan():
    current = PlanRow(
        saving="as it is", batch_size=16, peak_reserved_bytes=58 * MiB, largest_batch_size=300
    )
    rows = {
        "freeze all but the last layer": ("freezing", 10, 0.0),
        "SGD": ("optimizer", 20, 0.0),
        "checkpoint 6 blocks": ("checkpointing", 30, 16.2),
        "16-true": ("precision", 25, 0.0),
        "expandable_segments": ("allocator", 40, 0.0),
        "zero_grad before forward": ("zero_grad", 45, 0.0),
    }
    changing = ("freezing", "optimizer", "precision")
    tried = tuple(
        PlanRow(
            saving=saving,
            kind=kind,
            group=SavingGroup.CHANGES_TRAINING if kind in changing else SavingGroup.SAME_RESULT,
            batch_size=16,
            peak_reserved_bytes=size * MiB,
            largest_batch_size=400,
            extra_compute_pct=extra,
            line=f"the line of {saving}",
        )
        for saving, (kind, size, extra) in rows.items()
    )
    return Plan(
        current=current, tried=tried, device_name="a card", capacity_bytes=GiB, headroom=0.05
    )


def test_the_brief_report_reads_as_it_did(request):
    made = report(plan=plan(), notes=("Something else is to be known.",))
    text = text_of(made, dashboard="tensorboard --logdir runs/version_0") + "\n"
    golden = GOLDEN / "brief.txt"
    if request.config.getoption("--overwrite-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_a_training_set_that_fits_is_named_with_its_size():
    share = {"dataset_size": 200}
    made = report(advice=suggested(BatchSizeBounds(**share)))
    assert "batch size   the whole training set (200) fits with 5 % kept free (now 16)" in (
        text_of(made)
    )
    made = report(advice=suggested(BatchSizeBounds(**share, world_size=2)))
    assert "a rank's whole share of the training set (100) fits" in text_of(made)
    made = report(advice=suggested(BatchSizeBounds(dataset_size=10**6)))
    assert "218 is the largest that fits with 5 % kept free (now 16)" in text_of(made)


@pytest.mark.parametrize(
    ("largest", "said"),
    [
        (218, "218 should fit with 5 % kept free (now 16), perhaps a larger one too"),
        (8, "8 may fit with 5 % kept free (now 16); only a prediction can tell"),
    ],
)
def test_a_batch_size_that_follows_from_one_measured_step_is_no_limit(largest, said):
    advice = replace(
        suggested(BatchSizeBounds()), is_measured=True, largest=largest, batch_size=largest
    )
    assert said in " ".join(text_of(report(advice=advice)).split())


def test_it_has_about_18_lines_of_at_most_100_columns():
    text = text_of(report(plan=plan()), dashboard="tensorboard --logdir runs/version_0")
    lines = text.splitlines()
    assert len(lines) <= 18
    assert max(map(len, lines)) <= 100
    assert lines[2].startswith("  FITS   measured peak 58.0 MiB reserved, 48.0 MiB allocated")


def test_a_step_that_does_not_fit_says_so_first_and_what_to_do():
    predicted = traced(16)
    setup = replace(SETUP, target="X")
    made = report(measured=None, device=DeviceMemory(capacity_bytes=32 * MiB), setup=setup)
    text = text_of(made)
    assert text.splitlines()[2].startswith("  DOES NOT FIT   predicted peak 58.0 MiB reserved")
    assert text.splitlines()[2].endswith(" 181 %")
    assert "A100-SXM4-80GB, for X (32.0 MiB)" in text.splitlines()[0]
    assert "what_if" in line_with(text, "to save")
    assert predicted.fits


def test_on_its_own_device_a_prediction_that_runs_out_of_memory_does_not_fit():
    small = traced(16, device="24MiB")
    made = report(
        prediction=small, measured=None, device=DeviceMemory(capacity_bytes=24 * MiB), advice=None
    )
    assert not small.fits
    assert made.verdict.word == "DOES NOT FIT"


def test_a_step_with_retries_says_so():
    step = as_measured(traced(16).step)
    windows = (replace(step.windows[0], num_alloc_retries=2), *step.windows[1:])
    made = report(measured=replace(step, windows=windows))
    assert made.verdict.word == "FITS WITH RETRIES"


def test_a_step_of_which_only_the_resident_size_is_known_has_no_table_of_phases():
    step = as_measured(traced(16).step)
    windows = tuple(replace(window, peak_allocated_bytes=None) for window in step.windows)
    made = replace(report(), measured=replace(step, windows=windows), prediction=None)
    shown = text_of(made)
    assert "peak of" not in shown
    assert "backward" not in shown


def test_without_a_capacity_there_is_a_peak_and_no_share():
    line = text_of(report(device=DeviceMemory(), advice=None)).splitlines()[2]
    assert line == "  PEAK   measured peak 58.0 MiB reserved, 48.0 MiB allocated"


def test_all_categories_at_the_peak_add_up_to_it():
    made = report()
    text = text_of(made)
    assert "at the predicted peak (backward)  48.0 MiB" in text
    sizes = made.prediction.by_category
    assert len(sizes) == 6
    for category, size in sizes.items():
        assert brief_bytes(size) in line_with(text, category.label)
    assert sum(made.prediction.by_category.values()) == made.prediction.peak_allocated_bytes


def test_what_is_too_small_to_matter_is_one_row_with_its_names():
    held = {
        Category.PARAMETER: 50 * MiB,
        Category.BUFFER: 1000,
        Category.GRADIENT: 50 * MiB,
        Category.OPTIMIZER_STATE: 100 * MiB,
    }
    made = report(prediction=law(held=held), measured=None, advice=None)
    assert "7.28 KiB" in line_with(text_of(made), "activations, 3 others")
    assert "50.0 MiB" in line_with(text_of(made), "gradients")


def test_the_phase_of_the_peak_is_marked():
    marked = [line for line in text_of(report()).splitlines() if "◀" in line]
    assert len(marked) == 1
    assert marked[0].split()[:5] == ["backward", "48.0", "MiB", "48.0", "MiB"]


def test_savings_that_change_nothing_but_memory_and_time_are_named_with_their_line():
    text = text_of(report(plan=plan()))
    first = line_with(text, "to save")
    assert "checkpoint 6 blocks  → 30.0 MiB, +16 % compute   the line" in first
    assert first.endswith("the line of checkpoint 6 blocks")
    assert "expandable_segments" in text
    for saving in ("freeze", "SGD", "16-true"):
        assert saving not in text


def test_an_error_above_one_percent_and_one_mebibyte_has_one_line_with_both_figures():
    predicted = traced(16).step
    for more in (0, MiB // 2, MiB):
        made = report(measured=as_measured(predicted, more_in_backward=more))
        assert made.deviation is None
        assert "\n  prediction" not in text_of(made)
    made = report(measured=as_measured(predicted, more_in_backward=4 * MiB))
    assert line_with(text_of(made), "  prediction   peak of backward").startswith(
        "  prediction   peak of backward: predicted 48.0 MiB, measured 52.0 MiB (-7.7 %); "
        "temporary memory"
    )


def test_more_than_a_mebibyte_that_is_less_than_a_percent_is_no_error():
    large = traced(1000)
    made = report(
        prediction=large, measured=as_measured(large.step, more_in_backward=5 * MiB), advice=None
    )
    assert made.deviation is None


def test_a_warm_up_step_is_called_one_and_set_beside_no_prediction():
    warm_up = as_measured(traced(16).warm_up, is_warm_up=True)
    text = text_of(report(measured=warm_up, advice=None))
    assert "warm-up step" in text.splitlines()[0]
    assert "predicted  " not in line_with(text, "peak of")


def test_without_a_prediction_what_the_model_holds_is_measured():
    text = text_of(replace(report(), prediction=None))
    assert "at the measured peak (backward)  48.0 MiB" in text
    assert "activations and other" in text
    assert "predicted" not in text


def test_a_textbook_prediction_has_both_edges():
    made = report(prediction=formula(), measured=None, advice=None)
    assert "1.00 MiB to 40.0 MiB" in line_with(text_of(made), "  forward  ")


def test_a_formula_gives_no_verdict_between_its_edges():
    for capacity, word in ((64 * MiB, "FITS"), (20 * MiB, "PEAK"), (MiB // 2, "DOES NOT FIT")):
        device = DeviceMemory(capacity_bytes=capacity)
        made = report(prediction=formula(), measured=None, device=device, advice=None)
        assert made.verdict.word == word


def formula():
    return law(
        held=dict.fromkeys((Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE), 0)
        | {Category.PARAMETER: MiB},
        input=LinearBytes(fixed_bytes=0, per_sample_bytes=0),
        outputs=LinearBytes(fixed_bytes=0, per_sample_bytes=0),
        kept=LinearBytes(fixed_bytes=39 * MiB, per_sample_bytes=0),
        saved=LinearBytes(fixed_bytes=0, per_sample_bytes=0),
    )


def test_without_anything_it_says_that_nothing_was_recorded():
    empty = Report(measured=None, prediction=None, device=DeviceMemory(), advice=None)
    assert "nothing was recorded" in text_of(empty)


def test_a_console_without_box_letters_gets_ascii(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    text = plain(brief_report(report(plan=plan()), letters_here()))
    assert text.isascii()
    assert "?" not in text


def test_names_of_others_cannot_move_the_cursor():
    made = report(setup=Setup(model="Net\x1b[2J"))
    assert "\x1b" not in text_of(made)


# Colours and verbosity.


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


class Proxy(io.TextIOBase):
    """As rich's, while it draws a progress bar."""

    rich_proxied_file = Terminal()
    encoding = "utf-8"


@pytest.mark.parametrize(
    ("stdout", "environment", "is_coloured"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), {}, False),
        (Proxy(), {}, True),
    ],
)
def test_there_are_colours_on_a_terminal_alone(monkeypatch, stdout, environment, is_coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stdout)
    printed = []
    Console(printed.append, 1).show(brief_report(report(), letters_here()))
    assert ("\x1b[1;32mFITS\x1b[0m" in printed[0]) == is_coloured
    assert ("\x1b" in printed[0]) == is_coloured


@pytest.mark.parametrize(("verbose", "expected"), [(0, []), (1, ["1"]), (2, ["1", "2"])])
def test_each_level_prints_what_those_below_do(verbose, expected):
    printed = []
    console = Console(printed.append, verbose)
    console.say("1")
    console.say("2", level=2)
    assert printed == expected


# The end.


def ending(step, **changes):
    figures = {"num_steps": 1100, "largest": step, "num_alloc_retries": 0}
    figures |= {"num_read": 1100, "num_read_since": 1098}
    return Ending(**(figures | changes))


def closing(first, last, end):
    return plain(closing_lines(first, last, end, Letters())).splitlines()


def test_a_training_in_which_nothing_changes_ends_with_one_line():
    made = report()
    assert closing(made, made, ending(made.measured)) == [
        "memcallback: 1,100 steps, peak 58.0 MiB reserved, constant, as predicted, no retries"
    ]


@pytest.mark.parametrize(
    ("num_steps", "num_read", "since", "verdict"),
    [
        (1100, 27, 25, "constant, as predicted"),
        (40, 3, 1, "3 of 40 steps read"),
        (1100, 6, 4, "6 of 1,100 steps read"),
        (3, 3, 1, "constant, as predicted"),
        (2, 2, 0, "as predicted"),  # the report was of the last step
    ],
)
def test_steps_that_were_not_read_are_constant_and_as_predicted_only_if_enough_others_were(
    num_steps, num_read, since, verdict
):
    made = report()
    end = ending(made.measured, num_steps=num_steps, num_read=num_read, num_read_since=since)
    (line,) = closing(made, made, replace(end, num_alloc_retries=None))
    assert line == f"memcallback: {num_steps:,} steps, peak 58.0 MiB reserved, {verdict}"


def test_that_the_few_steps_that_were_read_are_not_as_predicted_is_said():
    made = report(measured=as_measured(traced(16).step, more_in_backward=6 * MiB))
    (line,) = closing(made, made, ending(made.measured, num_steps=40, num_read=3, num_read_since=1))
    assert ", not as predicted, 3 of 40 steps read, " in line


def test_what_has_changed_since_the_report_is_said():
    before = report()
    after = report(measured=as_measured(traced(16).step, more_in_backward=6 * MiB))
    first, *rest = closing(before, after, ending(after.measured, num_alloc_retries=3))
    assert first == (
        "memcallback: 1,100 steps, peak 58.0 MiB reserved, not as predicted, 3 retries"
    )
    assert rest[0] == "  changed      peak of backward 48.0 MiB → 54.0 MiB"
    assert rest[1].startswith("  prediction   peak of backward: predicted 48.0 MiB, measured 54.0")


def test_an_error_that_the_report_has_named_is_not_named_again():
    made = report(measured=as_measured(traced(16).step, more_in_backward=6 * MiB))
    (line,) = closing(made, made, ending(made.measured))
    assert "constant, not as predicted" in line


def test_a_step_with_a_larger_peak_than_the_typical_one_is_said():
    made = report(prediction=traced(16, device="cpu"))
    large = as_measured(traced(16, device="cpu").step, more_in_backward=9 * MiB, index=811)
    (line,) = closing(made, made, ending(large, num_alloc_retries=None))
    assert "peak 48.0 MiB allocated (57.0 MiB in batch 812)" in line
    assert "constant" not in line
    assert "retries" not in line


def test_notes_of_the_end_are_said_and_those_of_the_report_are_not_repeated():
    before, after = report(notes=("Known.",)), report(notes=("Known.", "New."))
    assert closing(before, after, ending(after.measured))[1:] == ["  note         New."]


def test_several_ranks_have_a_line_with_their_range_and_the_worst():
    points = tuple(
        RankPoint(
            rank=rank, number=7, peak_reserved_bytes=(60 + rank) * GiB, capacity_bytes=80 * GiB
        )
        for rank in range(8)
    )
    made = report(ranks=RankValues(number=7, points=points, num_ranks=8))
    assert closing(made, made, ending(made.measured))[1] == (
        "  ranks        0-7: 60.0 GiB … 67.0 GiB reserved, worst rank 7 (83.8 % of its capacity)"
    )


def test_what_ran_too_short_for_a_steady_step_says_so_little():
    empty = Report(measured=None, prediction=None, device=DeviceMemory(), advice=None)
    assert closing(None, empty, ending(None, num_steps=1, num_alloc_retries=None)) == [
        "memcallback: 1 step"
    ]


# Deviations that a CPU explains.


def with_buckets(predicted):
    """The same on a CPU, with 4 MiB in every phase that the measurement has not."""
    windows = tuple(
        replace(
            window,
            start=replace(window.start, allocated_bytes=window.start.allocated_bytes + 4 * MiB),
            end=replace(window.end, allocated_bytes=window.end.allocated_bytes + 4 * MiB),
            peak_allocated_bytes=window.peak_allocated_bytes + 4 * MiB,
        )
        for window in predicted.windows
    )
    return replace(predicted, windows=windows)


class WithBuckets:
    """What a prediction has for comparisons."""

    def __init__(self, step):
        self.step, self.batch_size = step, step.batch_size


def test_buckets_that_a_cpu_does_not_measure_are_the_reason_where_they_are():
    from memcallback.report.deviation import largest_deviation

    plain_step = traced(16, device="cpu").step
    predicted = WithBuckets(with_buckets(plain_step))
    measured = as_measured(plain_step)
    found = largest_deviation(predicted, measured, has_buckets=True)
    assert found.where == "peak of backward"
    assert found.sentence().endswith(
        "; a CPU does not measure the buckets of DistributedDataParallel (4.00 MiB)"
    )
    assert "buckets" not in largest_deviation(predicted, measured).sentence()


def test_buckets_that_a_cpu_does_not_measure_are_no_miss_of_the_prediction():
    plain_step = traced(16, device="cpu").step
    predicted = WithBuckets(with_buckets(plain_step))
    for has_buckets, words in ((True, "as predicted, but a CPU does not"), (False, "not as pred")):
        made = report(
            prediction=predicted,
            measured=as_measured(plain_step),
            setup=Setup(has_buckets=has_buckets),
        )
        line, *_ = closing(made, made, ending(made.measured))
        assert f", {words}" in line


def test_steps_that_cannot_be_compared_have_no_deviation():
    from memcallback.report.deviation import largest_deviation

    predicted = traced(16)
    other = as_measured(predicted.step, more_in_backward=9 * MiB)
    assert largest_deviation(predicted, other) is not None
    for changes in ({"is_warm_up": True}, {"is_interrupted": True}, {"batch_size": 3}):
        assert largest_deviation(predicted, replace(other, **changes)) is None
    assert largest_deviation(None, other) is None


def test_the_largest_consumers_add_up_to_the_peak_and_have_no_root_module():
    predicted = traced(16)
    found = predicted.consumers
    assert sum(consumer.num_bytes for consumer in found) == predicted.peak_allocated_bytes
    assert [consumer.name for consumer in found][:2] == ["net.linear", "backward of mean"]
