"""Replays run in the user's process, and a child asks cuDNN, which opens a context on the card."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.batch_size.estimate import suggest
from memcallback.core.answers import has_answers
from memcallback.core.units import GiB
from memcallback.cuda.convolution import cudnn, workspace
from memcallback.cuda.convolution.call import Convolution, Direction
from memcallback.devices.catalogue import find_device
from memcallback.isolation import isolated
from memcallback.prediction import asking_apart
from memcallback.prediction.memory_viz import snapshot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork")

CONVOLUTION = Convolution(
    Direction.FORWARD, weight_shape=(16, 3, 3, 3), padding=(0, 0), stride=(1, 1), dilation=(1, 1)
)
#: The inputs of the convolutions that this process has asked about.
asked_here = []
#: The children that were started.
started = []


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

    def noted_fork(*, fork=isolated._fork):
        started.append("a child")
        return fork()

    monkeypatch.setattr(workspace, "_plans", noted_plans)
    monkeypatch.setattr(isolated, "_fork", noted_fork)
    monkeypatch.setattr(asking_apart, "_known", {})
    monkeypatch.setattr(asking_apart, "_has_failed", False)
    monkeypatch.delenv("MEMCALLBACK_ISOLATE")
    if "cuda" not in request.keywords:  # other tests of this process may have used CUDA
        monkeypatch.setattr(asking_apart, "is_cuda_initialized", lambda: False)
    clear()
    yield request.param
    clear()


def clear():
    asked_here.clear()
    started.clear()
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


def of_replay(prediction):
    values = prediction.to_dict()
    return {name: values[name] for name in ("steps", "fits", "limit_batch_size", "out_of_memory")}


def refuse_to_fork(monkeypatch, error):
    def fork():
        raise error

    monkeypatch.setattr(isolated, "_fork", fork)


def test_another_batch_size():
    prediction = predicted()
    started.clear()
    other = prediction.at(48)
    assert started == ["a child"]
    assert of_replay(other) == of_replay(predicted(batch_size=48))
    assert of_replay(other) != of_replay(prediction)
    assert not asked_here


def test_a_search_starts_one_child():
    prediction = predicted()
    started.clear()
    assert of_replay(prediction.on("24GiB")) != of_replay(prediction)
    assert started == ["a child"]
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
    started.clear()
    prediction.save_html(tmp_path / "page.html")
    assert started == ["a child"]
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


def test_the_suggestion_of_a_report_starts_one_child():
    prediction = predicted()
    started.clear()
    advice = suggest(measured=None, predicted=prediction, capacity_bytes=10 * GiB)
    assert advice.batch_size
    assert started == ["a child"]
    assert not asked_here


def test_nothing_is_asked_twice():
    prediction = predicted()
    sizes = (48, 2200)
    known = [of_replay(prediction.at(size)) for size in sizes]
    started.clear()
    # Copies have no results of their own.
    others = [of_replay(pickle.loads(pickle.dumps(prediction)).at(size)) for size in sizes]
    assert others == known
    assert not started
    assert not asked_here


def test_in_this_process_no_replay_starts_one():
    started.clear()
    advice = mc.suggest_batch_size(step(), device="H100", isolate=False)
    assert advice.batch_size
    assert asked_here
    assert not started


@pytest.mark.parametrize(
    "error", [OSError("no more processes"), RuntimeError("can't fork at interpreter shutdown")]
)
def test_without_a_child_it_is_asked_here(monkeypatch, error):
    prediction, expected = predicted(), of_replay(predicted(batch_size=48))
    refuse_to_fork(monkeypatch, error)
    assert of_replay(prediction.at(48)) == expected
    assert asked_here


def test_after_a_child_that_hangs_none_is_started(monkeypatch):
    prediction = predicted()
    test, plans = os.getpid(), workspace._plans

    def plans_of_a_child_that_hangs(*problem, **options):
        if os.getpid() != test:
            threading.Event().wait()
        return plans(*problem, **options)

    monkeypatch.setattr(workspace, "_plans", plans_of_a_child_that_hangs)
    monkeypatch.setattr(asking_apart, "_TIMEOUT_S", 0.5)
    clear()
    peaks = [prediction.at(size).peak_reserved_bytes for size in (48, 49, 50)]
    assert started == ["a child"]
    monkeypatch.setattr(workspace, "_plans", plans)
    clear()
    assert peaks == [predicted(size).peak_reserved_bytes for size in (48, 49, 50)]


def test_what_a_child_does_not_answer_is_asked_here(monkeypatch):
    prediction, expected = predicted(), of_replay(predicted(batch_size=48))
    test, plans = os.getpid(), workspace._plans

    def plans_of_a_full_child(*problem, **options):
        if os.getpid() != test and asked_here:
            raise MemoryError
        asked_here.append(problem[1])
        return plans(*problem, **options)

    monkeypatch.setattr(workspace, "_plans", plans_of_a_full_child)
    clear()
    assert of_replay(prediction.at(48)) == expected
    # The first question is the child's.
    assert 0 < len(asked_here) < 2 * 3


def test_an_error_is_that_of_the_work():
    def work():
        workspace.workspace_bytes(CONVOLUTION, (48, 3, 16, 16), find_device("H100"))
        raise KeyError("of the work")

    with pytest.raises(KeyError, match="of the work") as caught:
        asking_apart.asking_apart(work)
    assert caught.value.__context__ is None
    assert started == ["a child"]
    assert not asked_here


@pytest.mark.parametrize("is_known", [True, False])
def test_an_interrupt_leaves_nothing_behind(is_known):
    """Whether it comes while answers are looked up or while they are asked."""
    problem = (CONVOLUTION, (48, 3, 16, 16), find_device("H100"))

    def work():
        if is_known:
            raise KeyboardInterrupt
        workspace.workspace_bytes(*problem)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asking_apart.asking_apart(work)
    assert not has_answers()
    clear()
    workspace.workspace_bytes(*problem)
    assert asked_here


def test_in_a_process_that_was_forked_from_one_that_uses_cuda(monkeypatch):
    prediction, expected = predicted(), of_replay(predicted(batch_size=48))
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert of_replay(prediction.at(48)) == expected


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
def test_a_process_with_a_context_asks():
    prediction, expected = predicted(), of_replay(predicted(batch_size=48))
    torch.ones(1, device="cuda")
    clear()
    assert of_replay(prediction.at(48)) == expected
    assert asked_here
    assert not started


@pytest.mark.cuda
@pytest.mark.parametrize("library", ["installed"], indirect=True)
def test_a_replay_opens_no_context():
    """In a fresh process."""
    program = """
import torch
from test_asking_apart import predicted

has_context = torch._C._cuda_hasPrimaryContext
before = has_context(0)
prediction = predicted()
prediction.at(48).page()
print(before, has_context(0))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    before, after = done.stdout.split()
    if before == "True":
        pytest.skip("a virtual device has a context from the start")
    assert after == "False"
