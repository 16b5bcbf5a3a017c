"""Replays in the user's process: questions to cuDNN, which open a context on a card, are not."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.cuda.convolution import cudnn, workspace
from memcallback.isolation import isolated
from memcallback.prediction import replay_apart
from memcallback.prediction.memory_viz import snapshot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork")

#: The inputs of the convolutions that this process has asked about.
asked_here = []


def made_up_plans(convolution, input_shape, device, mode, *, finds_device):
    """They take what the batch needs, or half of it, or nothing."""
    first_bytes = input_shape[0] ** 2 * 1000 * convolution.weight_shape[0]
    yield from (first_bytes, first_bytes // 2, 0)


@pytest.fixture(autouse=True, params=["made up", "installed"])
def library(request, monkeypatch):
    test, plans = os.getpid(), workspace._plans
    if request.param == "made up":
        plans = made_up_plans
        monkeypatch.setattr(cudnn, "load", lambda: SimpleNamespace(version=91900))
    elif not cudnn.is_available():
        pytest.skip("needs a cuDNN that answers without a device")

    def noted_plans(*problem, **options):
        if os.getpid() == test:
            asked_here.append(problem[1])
        return plans(*problem, **options)

    monkeypatch.setattr(workspace, "_plans", noted_plans)
    if "cuda" not in request.keywords:  # other tests of this process may have used CUDA
        monkeypatch.setattr(replay_apart, "_has_context", lambda: False)
    asked_here.clear()
    clear()
    yield request.param
    clear()


def clear():
    workspace._workspace_bytes.cache_clear()
    workspace._all_workspaces_bytes.cache_clear()


def step():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 4))
    return mc.TrainingStep(
        model,
        (torch.rand(8, 3, 16, 16), torch.zeros(8, dtype=torch.long)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


def predicted(batch_size=8):
    return mc.predict(step(), device="H100", batch_size=batch_size)


def refuse():
    raise OSError("no more processes")


def of_replay(prediction):
    values = prediction.to_dict()
    return {name: values[name] for name in ("steps", "fits", "limit_batch_size", "out_of_memory")}


def test_another_batch_size():
    prediction = predicted()
    assert of_replay(prediction.at(48)) == of_replay(predicted(batch_size=48))
    assert of_replay(prediction.at(48)) != of_replay(prediction)
    assert not asked_here


def test_another_device():
    prediction = predicted()
    assert of_replay(prediction.on("24GiB")) != of_replay(prediction)
    assert not asked_here


@pytest.mark.parametrize("library", ["made up"], indirect=True)
def test_where_the_first_plan_does_not_fit():
    large = predicted().at(2200)
    assert large.fits
    assert large.fits_without_retry is False
    assert of_replay(large) == of_replay(predicted(batch_size=2200))
    assert snapshot(large)["segments"]
    assert not asked_here


def test_pages(tmp_path):
    prediction = predicted()
    prediction.save_html(tmp_path / "page.html")
    most = [
        max(moment.allocated_bytes for moment in shown.timeline().moments)
        for shown in (prediction, prediction.at(9))
    ]
    assert most[0] < most[1]
    assert not asked_here


def test_advice():
    advice = mc.suggest_batch_size(step(), device="H100")
    assert advice.fits(advice.largest - 1)
    assert not advice.fits(2 * advice.largest)
    assert not asked_here


def test_nothing_is_started_where_nothing_is_asked(monkeypatch):
    prediction = predicted()
    known = prediction.at(48)
    monkeypatch.setattr(isolated, "_fork", refuse)
    assert of_replay(prediction.at(48)) == of_replay(known)
    assert not asked_here


def test_an_error_is_that_of_the_replay():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        predicted().at(0)


def test_without_a_child_it_is_asked_here(monkeypatch):
    prediction, expected = predicted(), of_replay(predicted(batch_size=48))
    monkeypatch.setattr(isolated, "_fork", refuse)
    assert of_replay(prediction.at(48)) == expected
    assert asked_here


def test_in_two_threads():
    prediction, found = predicted(), {}

    def run(sizes):
        for size in sizes:
            found[size] = prediction.at(size).peak_reserved_bytes

    threads = [threading.Thread(target=run, args=(range(start, 80, 20),)) for start in (20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {size: predicted(size).peak_reserved_bytes for size in found}
    assert len(found) == 6
    assert not asked_here


@pytest.mark.cuda
def test_a_process_with_a_context_asks(monkeypatch):
    prediction, expected = predicted(), of_replay(predicted(batch_size=48))
    torch.ones(1, device="cuda")
    started = []
    monkeypatch.setattr(isolated, "_fork", lambda: started.append("a child"))
    assert of_replay(prediction.at(48)) == expected
    assert asked_here
    assert not started
