from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import law as prediction
from hand_made import prediction as traced

from memcallback.batch_size.estimate import suggest
from memcallback.core.document import Table
from memcallback.core.step_memory import DeviceMemory, MemoryStats, PhaseMemory, StepMemory
from memcallback.core.types import Category, Kind, Phase
from memcallback.core.units import GiB, MiB, format_bytes
from memcallback.prediction.comparison import differences
from memcallback.prediction.textbook.law import LinearBytes
from memcallback.report.report import Report
from memcallback.report.tags import flat, step_curves

GOLDEN = Path(__file__).parents[1] / "golden"


def measured(**changes):
    split = {
        Category.PARAMETER: 10 * MiB,
        Category.BUFFER: 0,
        Category.GRADIENT: 10 * MiB,
        Category.OPTIMIZER_STATE: 20 * MiB,
        Category.INPUT: MiB,
    }

    def window(phase, peak, end):
        stats = MemoryStats(
            allocated_bytes=end,
            reserved_bytes=128 * MiB,
            num_alloc_retries=0,
            num_ooms=0,
            by_category=split,
        )
        return PhaseMemory(
            phase=phase,
            covers=(phase,),
            start=stats,
            end=stats,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=128 * MiB,
        )

    windows = (
        window(Phase.FORWARD, 80 * MiB, 71 * MiB),
        window(Phase.BACKWARD, 100 * MiB, 51 * MiB),
        window(Phase.OPTIMIZER_STEP, 61 * MiB, 51 * MiB),
    )
    figures = {
        "kind": Kind.MEASURED,
        "source": "CUDA caching allocator",
        "device_name": "a card",
        "windows": windows,
        "index": 1,
        "batch_size": 10,
    }
    return StepMemory(**(figures | changes))


def report(**changes):
    step = measured()
    device = DeviceMemory(
        capacity_bytes=GiB, used_bytes=256 * MiB, reserved_bytes=128 * MiB, other_processes_bytes=0
    )
    advice = suggest(measured=step, predicted=None, capacity_bytes=GiB, outside_bytes=128 * MiB)
    held = {
        Category.PARAMETER: 10 * MiB,
        Category.BUFFER: 0,
        Category.GRADIENT: 10 * MiB,
        Category.OPTIMIZER_STATE: 20 * MiB,
    }
    law = prediction(
        held=held,
        input=LinearBytes(fixed_bytes=0, per_sample_bytes=MiB // 10),
        outputs=LinearBytes(fixed_bytes=0, per_sample_bytes=4 * MiB),
        kept=LinearBytes(fixed_bytes=0, per_sample_bytes=4 * MiB),
        saved=LinearBytes(fixed_bytes=0, per_sample_bytes=3 * MiB),
        gradients_live_in_forward=True,
        caveats=("Something was assumed.",),
    )
    figures = {
        "measured": step,
        "prediction": law,
        "device": device,
        "advice": advice,
        "lifetime_peak_allocated_bytes": 100 * MiB,
    }
    return Report(**(figures | changes))


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_the_report_reads_as_it_did(form, request):
    written = report().to_text() if form == "text" else report().to_markdown()
    golden = GOLDEN / f"report.{'txt' if form == 'text' else 'md'}"
    if request.config.getoption("--overwrite-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(written, encoding="utf-8")
    assert written == golden.read_text(encoding="utf-8")


def row(made, label):
    return next(
        cells for cells in made.table().rows if cells[0].strip().startswith(label) and cells[3]
    )


def test_each_phase_has_predicted_and_measured_with_the_signed_error():
    made = report()
    predicted = made.prediction.phases[Phase.BACKWARD].peak_allocated_bytes
    assert row(made, "backward")[3] == "100.00 MiB"
    assert row(made, "backward")[4] == f"{100 * (predicted - 100 * MiB) / (100 * MiB):+.1f} %"


def test_activations_are_what_is_left_at_the_end_of_forward():
    assert row(report(), "activations")[3] == "30.00 MiB"


def test_memory_outside_the_allocator_is_a_figure():
    assert row(report(), "non-PyTorch")[3] == "128.00 MiB"
    assert row(report(), "capacity")[3:] == ("1024.00 MiB", "")


def test_what_all_processes_use_has_a_row_of_its_own_and_no_share_is_an_error():
    assert row(report(), "used by all (25.0 %)")[3:] == ("256.00 MiB", "")
    assert not any("used" in cells[-1] for cells in report().table().rows)


def test_the_categories_at_the_predicted_peak_are_all_there_and_add_up():
    made = traced_report()
    rows = made.table().rows
    start = next(number for number, cells in enumerate(rows) if "at the predicted" in cells[0]) + 1
    labels = [cells[0].strip() for cells in rows[start:]]
    categories = [category.label for category in made.prediction.by_category]
    assert labels[: len(categories)] == categories
    assert "parameters" in categories
    assert sum(made.prediction.by_category.values()) == made.prediction.peak_allocated_bytes


@pytest.mark.parametrize("form", ["to_text", "to_markdown"])
def test_text_and_markdown_begin_with_the_verdict(form):
    first = getattr(report(), form)().splitlines()[0]
    assert first == "FITS: measured peak 128 MiB reserved, 100 MiB allocated: 12 % of 1.00 GiB."


def test_what_is_unknown_is_not_available_and_the_reason_is_said():
    made = report(device=DeviceMemory(unavailable="NVML is not available: no driver"))
    assert row(made, "capacity")[3] == "n/a"
    assert row(made, "non-PyTorch")[3] == "n/a"
    assert (
        "Some values of the device are missing: NVML is not available: no driver." in made.lines()
    )


def test_without_a_prediction_there_are_no_columns_for_one():
    for made in (report(prediction=None), report(measured=measured(is_warm_up=True))):
        assert made.table().columns == ("", "measured")
        assert made.table().rows[-1] == ("  capacity", "1024.00 MiB")
    alone = report(prediction=None, device=DeviceMemory(), advice=None)
    assert "predicted" not in alone.to_text() + alone.to_markdown()


def test_a_warm_up_step_is_called_one():
    assert "(warm-up, " in report(measured=measured(is_warm_up=True)).table().title
    assert "(steady, " in report().table().title


def test_a_report_without_anything_says_that_nothing_was_recorded():
    empty = Report(measured=None, prediction=None, device=DeviceMemory(), advice=None)
    assert "nothing was recorded" in empty.to_text()


def test_cells_that_look_like_markup_come_out_as_they_are():
    table = Table(title="[red]", columns=("a", "b"), rows=(("[bold]x|y", "1"),))
    assert "[bold]x|y" in table.to_text()
    assert "[bold]x\\|y" in table.to_markdown()


def as_measured(step, **changes):
    """A predicted step as one that was measured, with figures of its backward pass changed."""
    window = step.phases[Phase.BACKWARD]
    windows = tuple(replace(one, **changes) if one == window else one for one in step.windows)
    return replace(step, kind=Kind.MEASURED, source="CUDA caching allocator", windows=windows)


def traced_report(step=None, **changes):
    predicted = traced(16)
    device = DeviceMemory(
        capacity_bytes=GiB, used_bytes=256 * MiB, reserved_bytes=58 * MiB, other_processes_bytes=0
    )
    step = as_measured(predicted.step) if step is None else step
    return Report(
        **({"measured": step, "prediction": predicted, "device": device, "advice": None} | changes)
    )


def test_the_report_of_a_traced_prediction_reads_as_it_did(request):
    backward = traced(16).phases[Phase.BACKWARD]
    made = traced_report(
        as_measured(traced(16).step, peak_allocated_bytes=backward.peak_allocated_bytes + 4 * MiB)
    )
    golden = GOLDEN / "report_traced.txt"
    if request.config.getoption("--overwrite-golden"):
        golden.write_text(made.to_text(), encoding="utf-8")
    assert made.to_text() == golden.read_text(encoding="utf-8")


def test_a_traced_prediction_has_no_low_edge_and_a_reserved_peak():
    made = traced_report()
    assert made.table().columns == ("", "predicted", "measured", "error")
    assert next(cells for cells in made.table().rows if "peak reserved" in cells[0])[1:3] == (
        "58.00 MiB",
        "58.00 MiB",
    )
    assert not any("The prediction is off" in line for line in made.lines())


def test_a_difference_is_reported_beyond_the_band_alone():
    predicted = traced(16)
    peak = predicted.phases[Phase.BACKWARD].peak_allocated_bytes
    within = as_measured(predicted.step, peak_allocated_bytes=peak + MiB)
    beyond = as_measured(predicted.step, peak_allocated_bytes=peak + 2 * MiB)
    assert differences(predicted.step, within) == ()
    (difference,) = differences(predicted.step, beyond)
    assert difference.where == "peak allocated in backward"
    assert format_bytes(difference.predicted_bytes) == "48.02 MiB"
    assert format_bytes(difference.measured_bytes) == "50.02 MiB"
    assert difference.carrier == ("temporary memory and workspaces", 2 * MiB)


def test_a_difference_at_a_boundary_names_the_category_that_carries_it():
    predicted = traced(16)
    end = predicted.phases[Phase.BACKWARD].end
    more = replace(
        end,
        allocated_bytes=end.allocated_bytes + 5 * MiB,
        by_category=end.by_category | {Category.GRADIENT: 9 * MiB},
    )
    made = traced_report(as_measured(predicted.step, end=more))
    (line,) = [line for line in made.lines() if "The prediction is off" in line]
    assert line == (
        "The prediction is off: allocated at the end of backward: predicted 16.0 MiB, measured "
        "21.0 MiB (-23.8 %); gradients: 5.00 MiB more than predicted."
    )


def test_a_difference_of_a_peak_names_what_differs_at_the_phases_boundary_if_something_does():
    predicted = traced(16)
    window = predicted.phases[Phase.BACKWARD]
    more = replace(
        window.start,
        allocated_bytes=window.start.allocated_bytes + 5 * MiB,
        by_category=window.start.by_category | {Category.INPUT: 6 * MiB},
    )
    found = differences(
        predicted.step,
        as_measured(
            predicted.step, start=more, peak_allocated_bytes=window.peak_allocated_bytes + 5 * MiB
        ),
    )
    assert [difference.carrier[0] for difference in found] == ["input", "input"]


def test_a_difference_of_the_reserved_peak_says_whether_more_is_allocated():
    predicted = traced(16).step
    more = {"peak_reserved_bytes": predicted.peak_reserved_bytes + 20 * MiB}
    (difference,) = differences(predicted, as_measured(predicted, **more))
    assert difference.carrier == ("reserved but unallocated memory", 20 * MiB)
    more["peak_allocated_bytes"] = predicted.peak_allocated_bytes + 18 * MiB
    of_peak, of_reserved = differences(predicted, as_measured(predicted, **more))
    assert of_reserved.carrier == ("allocated memory", 18 * MiB)
    assert of_peak.carrier[1] == 18 * MiB


def test_on_a_cpu_the_boundaries_are_compared_and_peaks_are_not():
    predicted = traced(16, device="cpu").step
    peak = predicted.phases[Phase.BACKWARD].peak_allocated_bytes
    assert differences(predicted, as_measured(predicted, peak_allocated_bytes=peak + 5 * MiB)) == ()
    end = predicted.phases[Phase.BACKWARD].end
    (difference,) = differences(
        predicted,
        as_measured(predicted, end=replace(end, allocated_bytes=end.allocated_bytes + 5 * MiB)),
    )
    assert difference.carrier == ("activations and other", 5 * MiB)


def test_reserved_memory_may_differ_by_two_percent():
    predicted = traced(16)
    for reserved, number in ((58 * MiB, 0), (59 * MiB, 0), (62 * MiB, 1)):
        windows = tuple(
            replace(window, peak_reserved_bytes=reserved) for window in predicted.step.windows
        )
        assert len(differences(predicted.step, replace(predicted.step, windows=windows))) == number


def test_a_warm_up_step_or_another_batch_size_is_not_compared():
    predicted = traced(16)
    assert not any(
        "is off" in line for line in traced_report(as_measured(predicted.warm_up)).lines()
    )
    assert not any("is off" in line for line in traced_report(traced(20).step).lines())


def test_a_traced_prediction_has_the_tags_of_the_measured_step_and_the_capacity_a_curve():
    predicted = traced(16)
    device = DeviceMemory(capacity_bytes=GiB, used_bytes=256 * MiB, reserved_bytes=58 * MiB)
    curves = step_curves(as_measured(predicted.step), predicted.step, device)
    assert curves.keys() == {"", "predicted", "capacity"}
    assert curves[""] == curves["predicted"]
    assert list(curves[""]) == [
        "memory_gib/peak_forward",
        "memory_gib/peak_backward",
        "memory_gib/peak_optimizer",
        "memory_gib/reserved",
    ]
    assert curves["predicted"]["memory_gib/reserved"] == round(58 * MiB / GiB, 5)
    assert curves["capacity"] == {"memory_gib/reserved": 1.0}


def test_a_band_has_a_curve_for_its_lower_edge():
    curves = step_curves(measured(), report().prediction.step, DeviceMemory())
    lower, upper = curves["predicted_low"], curves["predicted"]
    assert all(lower[tag] <= upper[tag] for tag in lower)
    assert lower.keys() <= upper.keys()
    assert lower != upper


def test_what_is_no_news_has_no_point():
    step = as_measured(traced(16).step)
    tags = step_curves(step, None, DeviceMemory(used_bytes=GiB, reserved_bytes=0))[""]
    assert not any("retries" in tag or "non_pytorch" in tag for tag in tags)
    *before, last = step.windows
    last = replace(last, end=replace(last.end, num_alloc_retries=3))
    step = replace(step, windows=(*before, last))
    tags = step_curves(step, None, DeviceMemory(used_bytes=3 * GiB, reserved_bytes=GiB))[""]
    assert tags["memory/num_alloc_retries"] == 3
    assert tags["memory_gib/non_pytorch"] == 2


def test_loggers_without_runs_below_others_have_the_curve_in_the_tag():
    curves = {
        "": {"memory_gib/peak_forward": 1.0, "device/power_watts": 2.0},
        "predicted": {"memory_gib/peak_forward": 3.0},
        "capacity": {"memory_gib/reserved": 4.0},
    }
    assert flat(curves) == {
        "memory_gib/peak_forward": 1.0,
        "device/power_watts": 2.0,
        "memory_gib/predicted/peak_forward": 3.0,
        "memory_gib/capacity": 4.0,
    }


def test_values_of_the_device_are_beside_those_of_memory():
    device = DeviceMemory(
        capacity_bytes=GiB, utilisation_pct=87, temperature_celsius=54, power_watts=412.5
    )
    points = step_curves(measured(), None, device)[""]
    assert {tag: value for tag, value in points.items() if tag.startswith("device/")} == {
        "device/utilisation_pct": 87,
        "device/temperature_celsius": 54,
        "device/power_watts": 412.5,
    }
    points = step_curves(measured(), None, DeviceMemory(capacity_bytes=GiB))[""]
    assert not any(tag.startswith("device/") for tag in points)
