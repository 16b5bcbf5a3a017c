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
PEAKS = {f"memory_gib/peak_{phase}" for phase in ("forward", "backward", "optimizer")}


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
            scalars={
                run: {tag for tag in tags if tag.startswith("memory")}
                for run, tags in scalars.items()
            },
            texts={run: set(tags) for run, tags in texts.items()},
            images={run: set(tags) for run, tags in images.items()},
        )


def test_the_example_says_how_well_it_learned_and_how_to_open_the_curves(example):
    assert re.search(r"Validation accuracy: 0\.\d{3}", example.output)
    assert re.search(
        r"^  more +(\S*python\S* -m tensorboard\.main|tensorboard) --logdir "
        r"lightning_logs/version_0$",
        example.output,
        flags=re.MULTILINE,
    )


def test_there_are_four_charts_with_a_curve_for_each_run(dashboard):
    assert dashboard.scalars == {
        "version_0": PEAKS | {"memory_gib/resident"},
        "version_0/predicted": PEAKS,
        "version_0/capacity": {"memory_gib/resident"},
    }


def test_predicted_and_measured_curves_begin_at_the_same_step_and_agree(dashboard, server):
    for tag in PEAKS:
        measured, predicted = (
            server.ask(dashboard.url, "plugin/scalars/scalars", run=run, tag=tag)
            for run in ("version_0", "version_0/predicted")
        )
        # A prediction that holds is a dot where the measured line begins, which it would hide.
        assert [step for _, step, _ in measured][: len(predicted)] == [
            step for _, step, _ in predicted
        ]
        assert len(measured) > 1
        # What operators take for themselves on a CPU is not predicted.
        assert max(value for _, _, value in measured) == pytest.approx(predicted[-1][2], rel=0.02)


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
        "accumulate 4 batches"
        in server.ask(dashboard.url, "plugin/text/text", run="version_0", tag=plan)[-1]["text"]
    )
    text = server.ask(dashboard.url, "plugin/text/text", run="version_0", tag=tag)[-1]["text"]
    assert re.search("<p>(.*?)</p>", text)[1].startswith("FITS: measured peak ")
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
        "memory_pictures/1_timeline",
        "memory_pictures/2_at_the_peak",
        "memory_pictures/3_batch_size",
        "memory_pictures/4_what_if",
        "memory_pictures/5_modules",
    }
    for tag in dashboard.images["version_0"]:
        assert server.fetch_figure(dashboard.url, "version_0", tag).startswith(b"\x89PNG")
