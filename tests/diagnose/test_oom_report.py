"""What an out-of-memory report says, as text, Markdown and JSON."""

import json
from dataclasses import replace

from memcallback import OutOfMemoryReport
from memcallback.core.code_lines import CodeLine
from memcallback.core.units import GiB, MiB
from memcallback.diagnose.out_of_memory.parts import (
    OomLocation,
    OomMemoryState,
    OomTensor,
    PredictedPeak,
)
from memcallback.savings.plan import PlanRow

LINE = CodeLine("net.py", 34, "forward", "/nowhere/net.py")
SHORTAGE = OomMemoryState(
    requested_bytes=72 * MiB,
    capacity_bytes=16 * GiB,
    free_bytes=34 * MiB,
    allocated_bytes=15 * GiB,
    reserved_bytes=15 * GiB + 512 * MiB,
    available_bytes=15 * GiB + 546 * MiB,
    non_pytorch_bytes=512 * MiB,
    other_processes_bytes=0,
)
REPORT = OutOfMemoryReport(
    error="CUDA out of memory. Tried to allocate 72.00 MiB.",
    device_name="NVIDIA H200",
    place=OomLocation(
        phase="backward pass",
        step=12,
        operator="ConvolutionBackward0",
        module="net.conv1",
        line=LINE,
    ),
    shortage=SHORTAGE,
    by_category=(
        ("parameters", 44 * MiB),
        ("gradients", 0),
        ("allocated, no tensor found", 3 * MiB),
    ),
    tensors=(
        OomTensor(
            size_bytes=2 * GiB,
            shape=(64, 64, 112, 112),
            dtype="float32",
            owner="saved for ReluBackward0",
            line=LINE,
        ),
        OomTensor(size_bytes=GiB, shape=(), dtype="int64", owner="", module="net|fc"),
    ),
    num_tensors=208,
    batch=(("[0]", (64, 3, 224, 224), "float32"), ("[1]", (64,), "int64")),
    batch_size=64,
    expected=PredictedPeak(
        peak_allocated_bytes=17 * GiB,
        peak_reserved_bytes=20 * GiB,
        available_bytes=SHORTAGE.available_bytes,
        fits=False,
    ),
)


def test_the_text_says_where_what_was_short_and_what_stood():
    text = REPORT.to_text()
    assert text.startswith(
        "Out of memory on NVIDIA H200 in the backward pass of step 12 (batch size 64).\n"
    )
    assert "Memory ran out at ConvolutionBackward0 in module 'net.conv1'." in text
    assert "Your line: net.py:34 in forward" in text
    assert "The batch: [0] (64, 3, 224, 224) float32, [1] (64) int64." in text
    figures = dict(
        line.strip().rsplit("  ", 1)
        for line in text.splitlines()
        if line.startswith(" ") and line.endswith("iB")
    )
    figures = {name.strip(): size.strip() for name, size in figures.items()}
    assert figures["requested"] == "72.00 MiB"
    assert figures["reserved but unallocated"] == "512.00 MiB"
    assert figures["non-PyTorch"] == "512.00 MiB"
    assert figures["parameters"] == "44.00 MiB"
    assert "gradients" not in text
    assert "The 2 largest of 208 live tensors, measured" in text
    columns = [" ".join(line.split()) for line in text.splitlines()]
    assert "held by size tensor made at" in columns
    made_at = "net.py:34 in forward"
    assert f"saved for ReluBackward0 2.00 GiB float32 (64, 64, 112, 112) {made_at}" in columns
    assert "of module 'net|fc' 1024.00 MiB int64 ()" in columns
    assert REPORT.error not in text


def test_what_was_predicted_is_held_against_what_there_was():
    (said,) = [line for line in REPORT.sentences() if line.startswith("Predicted")]
    assert said == (
        "Predicted for this batch size: peak allocated 17.00 GiB, 1.47 GiB above the available "
        "15.53 GiB; peak reserved 20.00 GiB with unlimited memory."
    )


def test_a_page_says_what_the_batch_needs_before_where_memory_ran_out():
    headline, needed, *where = REPORT.page().verdict
    assert headline.startswith("Out of memory on NVIDIA H200")
    assert needed.startswith("Predicted for this batch size: peak allocated 17.00 GiB")
    assert where[0].startswith("Memory ran out at ConvolutionBackward0")
    without = replace(REPORT, expected=None).page().verdict
    assert without[1].startswith("Memory ran out at ConvolutionBackward0")
    assert without[-1] == where[-1]


def test_where_it_was_predicted_to_fit_something_else_holds_memory():
    fitting = PredictedPeak(
        peak_allocated_bytes=GiB, peak_reserved_bytes=2 * GiB, available_bytes=4 * GiB, fits=True
    )
    report = OutOfMemoryReport(
        error="",
        device_name="card",
        place=OomLocation(),
        shortage=OomMemoryState(),
        expected=fitting,
    )
    assert "It was predicted to fit, so something else uses memory" in report.sentences()[0]
    scattered = PredictedPeak(
        peak_allocated_bytes=3 * GiB,
        peak_reserved_bytes=5 * GiB,
        available_bytes=4 * GiB,
        fits=False,
    )
    report = OutOfMemoryReport(
        error="",
        device_name="card",
        place=OomLocation(),
        shortage=OomMemoryState(),
        expected=scattered,
    )
    assert "would fit, but not with fragmentation" in report.sentences()[0]


def row(saving, peak_gib, fits, problem=""):
    return PlanRow(
        saving=saving,
        batch_size=64,
        peak_allocated_bytes=int(peak_gib * GiB),
        fits=fits,
        line=f"use({saving})",
        problem=problem,
    )


def test_savings_are_ranked_those_that_fit_first_and_useless_ones_are_left_out():
    rows = [
        row("little", 16.5, False),
        row("hardly anything", 16.9, False),
        row("half", 8, True),
        row("worse", 18, False),
        row("most", 4, True),
        row("broken", 1, True, "no"),
    ]
    report = REPORT.with_savings(rows)
    assert [one.saving for one in report.savings] == ["most", "half", "little"]
    text = report.to_text()
    assert text.index("most ") < text.index("half ") < text.index("little ")
    assert "use(most)" in text
    assert "| most | 4.00 GiB | 13.00 GiB | yes |" in report.to_markdown()
    assert REPORT.savings == ()


def test_savings_are_shown_where_the_batch_size_is_unknown():
    report = replace(REPORT, batch_size=None).with_savings([row("half", 8, True)])
    assert "\nWhat would help, predicted\n" in report.to_text()


def test_markdown_has_the_error_and_the_tables():
    markdown = REPORT.to_markdown()
    assert markdown.startswith(
        "# Out of memory on NVIDIA H200 in the backward pass of step 12 (batch size 64).\n"
    )
    assert "Tried to allocate 72.00 MiB." in markdown
    assert "| requested | 72.00 MiB |" in markdown
    assert (
        "| saved for ReluBackward0 | 2.00 GiB | float32 (64, 64, 112, 112) | net.py:34 in forward |"
        in markdown
    )
    assert "net\\|fc" in markdown


def test_json_has_every_figure_with_its_unit():
    data = json.loads(json.dumps(REPORT.with_savings([row("half", 8, True)]).to_dict()))
    assert (data["phase"], data["step"], data["operator"], data["module"]) == (
        "backward pass",
        12,
        "ConvolutionBackward0",
        "net.conv1",
    )
    assert data["line"] == {"file": "net.py", "line": 34, "function": "forward", "text": ""}
    assert data["requested_bytes"] == 72 * MiB
    assert data["reserved_but_unallocated_bytes"] == 512 * MiB
    assert data["tensors"][0]["shape"] == [64, 64, 112, 112]
    assert data["tensors"][0]["line"]["line"] == 34
    assert data["predicted"]["shortfall_bytes"] == 17 * GiB - SHORTAGE.available_bytes
    assert data["savings"][0]["saved_bytes"] == 9 * GiB
    assert data["batch"][1] == {"name": "[1]", "shape": [64], "dtype": "int64"}


def test_little_is_said_where_little_is_known():
    report = OutOfMemoryReport(
        error="out of memory", device_name="cuda:0", place=OomLocation(), shortage=OomMemoryState()
    )
    assert report.to_text() == "Out of memory on cuda:0.\n"
    assert json.dumps(report.to_dict())


def test_of_a_job_of_several_ranks_the_rank_is_told():
    report = replace(REPORT, rank=3)
    assert report.headline() == REPORT.headline().removesuffix(".") + ", on rank 3."
    assert (report.to_dict()["rank"], REPORT.to_dict()["rank"]) == (3, None)
