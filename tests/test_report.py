from pathlib import Path

import pytest
from test_prediction import prediction

from memcallback.advise import suggest
from memcallback.events import Category, Phase
from memcallback.prediction import BytesLaw
from memcallback.report import Report
from memcallback.stats import DeviceMemory, Kind, MemoryStats, PhaseMemory, StepMemory
from memcallback.tables import Table
from memcallback.units import GiB, MiB

GOLDEN = Path(__file__).parent / "golden"


def measured(**changes):
    split = {
        Category.PARAMETER: 10 * MiB,
        Category.BUFFER: 0,
        Category.GRADIENT: 10 * MiB,
        Category.OPTIMIZER_STATE: 20 * MiB,
        Category.INPUT: MiB,
    }

    def window(phase, peak, end):
        stats = MemoryStats(allocated_bytes=end, reserved_bytes=128 * MiB, num_alloc_retries=0, num_ooms=0, by_category=split)
        return PhaseMemory(phase=phase, covers=(phase,), start=stats, end=stats, peak_allocated_bytes=peak, peak_reserved_bytes=128 * MiB)

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
    device = DeviceMemory(capacity_bytes=GiB, used_bytes=256 * MiB, reserved_bytes=128 * MiB, other_processes_bytes=0)
    advice = suggest(measured=step, predicted=None, capacity_bytes=GiB, outside_bytes=128 * MiB)
    held = {Category.PARAMETER: 10 * MiB, Category.BUFFER: 0, Category.GRADIENT: 10 * MiB, Category.OPTIMIZER_STATE: 20 * MiB}
    law = prediction(
        held=held,
        input=BytesLaw(fixed_bytes=0, per_sample_bytes=MiB // 10),
        outputs=BytesLaw(fixed_bytes=0, per_sample_bytes=4 * MiB),
        kept=BytesLaw(fixed_bytes=0, per_sample_bytes=4 * MiB),
        saved=BytesLaw(fixed_bytes=0, per_sample_bytes=3 * MiB),
        gradients_live_in_forward=True,
        caveats=("Something was assumed.",),
    )
    figures = {"measured": step, "prediction": law, "device": device, "advice": advice, "lifetime_peak_allocated_bytes": 100 * MiB}
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
    return next(cells for cells in made.table().rows if cells[0].strip().startswith(label) and cells[3])


def test_each_phase_has_predicted_and_measured_with_the_signed_error():
    made = report()
    predicted = made.prediction.phases[Phase.BACKWARD].peak_allocated_bytes
    assert row(made, "backward")[3] == "100.00 MiB"
    assert row(made, "backward")[4] == f"{100 * (predicted - 100 * MiB) / (100 * MiB):+.1f} %"


def test_activations_are_what_is_left_at_the_end_of_forward():
    assert row(report(), "activations")[3] == "30.00 MiB"


def test_memory_outside_the_allocator_is_a_figure():
    assert row(report(), "non-PyTorch")[3] == "128.00 MiB"
    assert row(report(), "capacity")[3:] == ("1024.00 MiB", "25.0 % used")


def test_what_is_unknown_is_not_available_and_the_reason_is_said():
    made = report(device=DeviceMemory(unavailable="NVML is not available: no driver"))
    assert row(made, "capacity")[3] == "n/a"
    assert row(made, "non-PyTorch")[3] == "n/a"
    assert "Of the device: NVML is not available: no driver." in made.lines()


def test_a_warm_up_step_is_called_one():
    assert "warm-up" in report(measured=measured(is_warm_up=True)).to_text().splitlines()[0]
    assert "steady" in report().to_text().splitlines()[0]


def test_a_report_without_anything_says_that_nothing_was_recorded():
    empty = Report(measured=None, prediction=None, device=DeviceMemory(), advice=None)
    assert "nothing was recorded" in empty.to_text()


def test_cells_that_look_like_markup_come_out_as_they_are():
    table = Table(title="[red]", columns=("a", "b"), rows=(("[bold]x|y", "1"),))
    assert "[bold]x|y" in table.to_text()
    assert "[bold]x\\|y" in table.to_markdown()
