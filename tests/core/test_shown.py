"""What a person sees of a result: its text where it is printed or shown by a notebook, one short
line where it is one value of many.
"""

import copy
import io
import pickle
import sys

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.prediction.textbook.predict import predict as predict_by_the_textbook

WIDTH = 32


def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@pytest.fixture(scope="module")
def step():
    return mc.TrainingStep(model(), torch.zeros(8, WIDTH), optimizer=torch.optim.AdamW)


@pytest.fixture(scope="module")
def results(step):
    prediction = mc.predict(step, device="24GiB")
    recorder = mc.MemoryRecorder(network := model(), device="cpu")
    optimizer = torch.optim.AdamW(network.parameters())
    with recorder.watch(network, optimizer):
        for _ in range(2):
            network(torch.zeros(8, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {
        "prediction": (prediction, "Live at the peak"),
        "advice": (mc.suggest_batch_size(step, device="24GiB"), "Largest batch size: "),
        "plan": (mc.what_if(step, device="24GiB"), "as it is"),
        "modules": (prediction.modules, "Linear"),
        "layers": (mc.layers(model(), torch.zeros(8, WIDTH)), "Linear"),
        "report": (recorder.report(), "peak allocated"),
        "measured step": (recorder.report().measured, "measured by CPU allocation events"),
        "predicted step": (prediction.step, "predicted by traced step"),
        "textbook": (predict_by_the_textbook(step), "to the upper bound of the peak"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "prediction",
        "advice",
        "plan",
        "modules",
        "layers",
        "report",
        "measured step",
        "predicted step",
        "textbook",
    ],
)
def test_a_result_is_printed_as_its_text_and_shown_so_by_a_notebook(results, name):
    result, part = results[name]
    assert part in str(result)
    shown = result._repr_mimebundle_(include=None, exclude=None)  # which IPython asks for first
    assert shown["text/plain"] == str(result)
    html = shown["text/html"]
    assert html.startswith("<iframe" if name == "prediction" else '<div class="memcallback">')
    assert html.count("<table") >= 1 or name == "prediction"
    assert str(result) == result.to_text().rstrip("\n")


def test_a_console_without_lines_gets_hyphens(results, monkeypatch):
    prediction, _ = results["prediction"]
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    print(prediction, flush=True)
    assert b" ------" in written.getvalue()


@pytest.mark.parametrize("name", ["prediction", "advice"])
def test_a_result_among_other_values_is_short(results, name):
    result, _ = results[name]
    text = repr([result])
    assert len(text) < 1500
    assert "batch" in text
    assert "Alloc(" not in text


def test_a_predictions_line_names_batch_and_device_and_replays_nothing(step):
    prediction = mc.predict(step, device="24GiB")
    assert repr(prediction).startswith(
        "<Prediction: batch size 8 on a card of 24.00 GiB, traced step of "
    )
    assert "_on_device" not in vars(prediction)
    assert len(repr(prediction.trace)) < 800


def test_a_step_is_shown_by_phase_with_reserved_memory_where_there_is_any(results):
    measured, _ = results["measured step"]
    predicted, _ = results["predicted step"]
    assert [row[0] for row in predicted.to_table().rows] == [
        "forward",
        "backward",
        "optimizer step",
    ]
    assert predicted.to_table().columns[-1] == "reserved peak"
    assert measured.to_table().columns[-1] == "peak"
    assert measured.to_table().rows[0][-1] == mc.format_bytes(
        measured.windows[0].peak_allocated_bytes
    )


def test_results_are_copied_and_pickled_as_before(results):
    prediction, _ = results["prediction"]
    assert copy.copy(prediction) == prediction
    modules, _ = results["modules"]
    assert pickle.loads(pickle.dumps(modules)) == modules
