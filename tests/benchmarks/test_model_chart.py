"""The chart of models in the documentation: its data is still what the script makes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import model_chart  # noqa: E402
from machine import latest_result  # noqa: E402

RESULTS = latest_result("cpu", "models.json")
DATA = json.loads(RESULTS.read_text())
POINTS = {model["name"]: model for model in DATA["models"]}


def test_the_table_is_that_of_the_data():
    assert RESULTS.with_suffix(".md").read_text() == model_chart.to_markdown(DATA)


def test_every_model_of_the_script_is_in_the_data():
    assert list(POINTS) == [name for names in model_chart.MODELS.values() for name in names]


def test_mixed_precision_takes_less_for_an_image_and_lets_more_fit():
    for model in POINTS.values():
        full, mixed = (model["trainings"][precision] for precision in model_chart.PRECISIONS)
        assert 0 < mixed["memory_per_image_bytes"] < full["memory_per_image_bytes"], model["name"]
        assert 0 < full["suggested_batch_size"] < mixed["suggested_batch_size"], model["name"]
        for found in (full, mixed):
            assert found["suggested_batch_size"] <= found["limit_batch_size"], model["name"]


@pytest.mark.cuda
def test_a_small_model_comes_to_what_the_data_says():
    torch, torchvision = pytest.importorskip("torch"), pytest.importorskip("torchvision")
    about = DATA["environment"]
    if (torch.__version__, torchvision.__version__) != (about["torch"], about["torchvision"]):
        pytest.skip(f"the data is of torch {about['torch']} and torchvision {about['torchvision']}")
    if model_chart.environment()["convolution_workspaces"] != about["convolution_workspaces"]:
        pytest.skip(f"the data has {about['convolution_workspaces']}")
    found, _ = model_chart.training("alexnet", "32-true")
    assert asdict(found) == POINTS["alexnet"]["trainings"]["32-true"]
