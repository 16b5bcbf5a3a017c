"""What a person sees in TensorBoard after the example: asked of the real server, by the calls that
its pages make.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("forward", "backward", "optimizer_step")
MEASURED = {f"memory/{phase}/peak_allocated_gib" for phase in PHASES}
PREDICTED = {f"memory/predicted/{phase}/peak_allocated_gib" for phase in PHASES}
OF_THE_DEVICE = {
    "memory/peak_resident_gib",
    "memory/capacity_gib",
    "memory/capacity_used_pct",
    "memory/prediction_error_pct",
}


@pytest.fixture(scope="module")
def server():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "render_dashboard.py")))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    options = ["--epochs", "1", "--what-if", "--per-module", "--log-dir", str(folder)]
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *options]
    # A machine's GPU stays out of it: on a CPU the set of tags is known. One thread, since tests
    # share the cores.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, output=done.stdout)


@pytest.fixture(scope="module")
def dashboard(example, server):
    """The server's answers, once it has read everything."""
    with server.serve(example.folder / "lightning_logs") as url:
        server.wait_until_loaded(url)
        scalars = server.wait_for(lambda: server.ask(url, "plugin/scalars/tags"), "The scalars")
        texts, images = server.ask(url, "plugin/text/tags"), server.ask(url, "plugin/images/tags")
        yield SimpleNamespace(
            url=url,
            layout=server.ask(url, "plugin/custom_scalars/layout"),
            scalars={
                run: {tag for tag in tags if tag.startswith("memory/")}
                for run, tags in scalars.items()
            },
            texts={run: set(tags) for run, tags in texts.items()},
            images={run: set(tags) for run, tags in images.items()},
        )


def charts(dashboard):
    return [chart for category in dashboard.layout["category"] for chart in category["chart"]]


def test_the_example_says_how_well_it_learned_and_how_to_open_the_curves(example):
    assert re.search(r"Validation accuracy: 0\.\d{3}", example.output)
    assert re.search(
        r"^  more +(\S*python\S* -m tensorboard\.main|tensorboard) --logdir "
        r"lightning_logs/version_0$",
        example.output,
        flags=re.MULTILINE,
    )


def test_the_run_has_exactly_the_tags_of_a_cpu_and_no_more_than_fifteen(dashboard):
    assert dashboard.scalars["version_0"] == MEASURED | PREDICTED | OF_THE_DEVICE
    assert len(dashboard.scalars["version_0"]) <= 15


def test_each_phase_has_a_chart_with_its_measured_peak_beside_the_predicted_one(dashboard):
    (category,) = [
        category
        for category in dashboard.layout["category"]
        if "beside the predicted ones" in category["title"]
    ]
    lines = {
        chart["title"].partition(":")[0]: chart["multiline"]["tag"] for chart in category["chart"]
    }
    assert lines == {
        phase.replace("_", " "): [
            f"memory/predicted/{phase}/peak_allocated_gib$",
            f"memory/{phase}/peak_allocated_gib$",
        ]
        for phase in PHASES
    }


def test_a_trace_has_no_band_and_no_chart_of_one(dashboard):
    assert not any("margin" in chart for chart in charts(dashboard))


def test_every_chart_of_lines_has_a_line_and_only_accelerators_figures_are_missing(dashboard):
    patterns = [chart["multiline"]["tag"] for chart in charts(dashboard) if "multiline" in chart]
    assert patterns
    without_line = set()
    for of_chart in patterns:
        found = {
            pattern: [tag for tag in dashboard.scalars["version_0"] if re.match(pattern, tag)]
            for pattern in of_chart
        }
        assert any(found.values()), of_chart
        without_line |= {pattern.rstrip("$") for pattern, tags in found.items() if not tags}
    assert without_line <= {
        "memory/peak_reserved_gib",
        "memory/predicted/peak_reserved_gib",
        "memory/non_pytorch_gib",
        "memory/num_alloc_retries",
    }


def test_predicted_and_measured_lines_have_the_same_steps_and_agree(dashboard, server):
    for phase in PHASES:
        tags = (
            f"memory/{phase}/peak_allocated_gib",
            f"memory/predicted/{phase}/peak_allocated_gib",
        )
        measured, predicted = (
            server.ask(dashboard.url, "plugin/scalars/scalars", run="version_0", tag=tag)
            for tag in tags
        )
        assert [step for _, step, _ in measured] == [step for _, step, _ in predicted]
        assert len(measured) > 1
        # What operators take for themselves on a CPU is not predicted.
        assert max(value for _, _, value in measured) == pytest.approx(predicted[-1][2], rel=0.02)


def band_layout(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    from memcallback.report.tensorboard import LAYOUT_RUN, write_layout

    write_layout(str(folder), has_band=True)
    events = EventAccumulator(str(folder / LAYOUT_RUN)).Reload()
    return Layout.FromString(
        events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    )


def test_the_textbook_law_has_a_chart_for_each_phase_with_the_measured_peak_in_its_band(tmp_path):
    in_band = [
        chart
        for category in band_layout(tmp_path).category
        for chart in category.chart
        if chart.HasField("margin")
    ]
    # One band a chart, since bands of one run share their colour.
    bands = [
        (series.value, series.lower, series.upper)
        for chart in in_band
        for series in chart.margin.series
    ]
    assert len(in_band) == len(bands) == 3
    assert set(bands) == {
        (
            f"memory/{phase}/peak_allocated_gib",
            f"memory/predicted/{phase}/low_gib",
            f"memory/predicted/{phase}/peak_allocated_gib",
        )
        for phase in PHASES
    }


def test_the_report_is_there_as_text_with_every_phase(dashboard, server):
    modules, tag, plan = sorted(dashboard.texts["version_0"])
    assert [one.rpartition("/")[0] for one in (modules, tag, plan)] == [
        "memory/modules",
        "memory/report",
        "memory/what_if",
    ]
    assert (
        "network.13"
        in server.ask(dashboard.url, "plugin/text/text", run="version_0", tag=modules)[-1]["text"]
    )
    assert (
        "accumulate 2 batches"
        in server.ask(dashboard.url, "plugin/text/text", run="version_0", tag=plan)[-1]["text"]
    )
    text = server.ask(dashboard.url, "plugin/text/text", run="version_0", tag=tag)[-1]["text"]
    assert all(
        word in text
        for word in (
            "forward",
            "backward",
            "optimizer step",
            "predicted",
            "measured",
            "Largest batch size",
        )
    )


def test_the_figures_are_there_as_pictures(dashboard, server):
    assert dashboard.images["version_0"] == {
        "memory/step_by_category",
        "memory/batch_size_curve",
        "memory/modules_icicle",
        "memory/what_if_bars",
    }
    for tag in dashboard.images["version_0"]:
        assert server.fetch_figure(dashboard.url, "version_0", tag).startswith(b"\x89PNG")
