"""The example without Lightning; tests/test_dashboard.py runs the one with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    command = [sys.executable, str(EXAMPLES / "plain_loop.py"), "--epochs", "6"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path_factory.mktemp("plain"), env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_loop_predicts_before_the_first_step(output):
    assert re.match(r"Before the first step: a peak of [\d.]+ MiB is predicted\.", output)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer step"])
def test_the_plain_loop_reports_each_phase_predicted_and_measured_with_the_error(output, phase):
    (row,) = re.findall(rf"^ *{phase} .*%$", output, flags=re.MULTILINE)
    assert re.search(r"[\d.]+ MiB +[\d.]+ MiB +[\d.]+ MiB +[+-]?[\d.]+ %$", row)


def test_the_plain_loop_counts_exactly_what_the_model_and_its_optimizer_hold(output):
    for category in ("parameters", "buffers", "optimizer state"):
        (row,) = re.findall(rf"^ *{category} .*$", output, flags=re.MULTILINE)
        assert row.endswith(" 0.0 %"), row


def test_the_plain_loop_learns_the_digits(output):
    (accuracy,) = re.findall(r"Validation accuracy: ([\d.]+)", output)
    assert float(accuracy) > 0.95
