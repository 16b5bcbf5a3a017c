"""A training does not wait for its prediction, which comes into its log and report all the same."""

from __future__ import annotations

import gc
import re
import sys
import weakref

import pytest
import torch
from event_files import curves_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memcallback as mc
from memcallback.core.errors import MemoryWarning

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork")


def loss_of(model, batch):
    return model(batch).square().mean()


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.Adam(model.parameters())


def train(model, optimizer, num_steps=4, batch=None):
    for _ in range(num_steps):
        loss_of(model, torch.ones(4, 8) if batch is None else batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def watched(tmp_path, loss=loss_of, **options):
    model, optimizer = parts()
    recorder = mc.MemoryRecorder(model, optimizer)
    step = mc.TrainingStep(model, torch.ones(4, 8), loss=loss, optimizer=optimizer)
    log = mc.MemoryLog(recorder, step, log_dir=tmp_path, log_every_n_steps=1, **options)
    recorder.watch()
    return model, optimizer, log


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options", [{}, {"wait_for_prediction": True}, {"isolate": False}], ids=str
)
def test_a_prediction_is_the_same_whenever_it_comes(tmp_path, options):
    alone, optimizer = parts()
    train(alone, optimizer)
    model, optimizer, log = watched(tmp_path, **options)
    train(model, optimizer)
    log.close()
    assert all(map(torch.equal, weights(model), weights(alone)))
    model, optimizer = parts()
    expected = mc.predict(
        mc.TrainingStep(model, torch.ones(4, 8), loss=loss_of, optimizer=optimizer), device="cpu"
    )
    assert log.prediction.step == expected.step
    assert log.report.prediction.step == expected.step
    curves = curves_of(tmp_path / "version_0")
    assert list(curves[""]["memory_gib/peak_forward"]) == [1, 2, 3, 4]
    assert next(iter(curves["predicted"]["memory_gib/peak_forward"])) == 1


def hanging(model, batch):
    while next(model.parameters()).sum().item() == 0:
        pass
    return loss_of(model, batch)


def test_a_prediction_that_hangs_is_ended_and_its_line_named(tmp_path):
    def record():
        model, optimizer, log = watched(tmp_path, hanging, timeout_s=10)
        train(model, optimizer)
        log.close()
        return log

    line = hanging.__code__.co_firstlineno
    with pytest.warns(
        MemoryWarning,
        match=rf"(?s)recorded but not predicted.*longer than 10 s.*test_training_goes_on\.py:"
        rf"({line + 1}|{line + 2}) in hanging",
    ):
        log = record()
    assert log.prediction is None
    assert log.report.measured is not None


def test_a_training_that_ends_earlier_waits_a_while_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("memcallback.record.monitor.PATIENCE_S", 0.1)
    model, optimizer, log = watched(tmp_path, hanging)
    train(model, optimizer)
    log.close()
    assert any("was not done when the training ended" in note for note in log.report.notes)


def test_a_step_that_ends_the_program_ends_its_prediction(tmp_path):
    def ending(model, batch):
        if type(batch) is not torch.Tensor:
            sys.exit(3)
        return loss_of(model, batch)

    def record():
        model, optimizer, log = watched(tmp_path, ending)
        train(model, optimizer)
        log.close()
        return log.report

    with pytest.warns(MemoryWarning, match="SystemExit: 3"):
        assert record().measured is not None


def test_no_batch_is_kept_alive_while_a_step_is_predicted():
    model, optimizer = parts()
    recorder = mc.MemoryRecorder(model, optimizer)
    batch = torch.ones(4, 8)
    step = mc.TrainingStep(model, batch, loss=hanging, optimizer=optimizer)
    # A log keeps a copy of the batch on the host, for an out-of-memory error.
    monitored = mc.MemoryLog(recorder, step.varied(), log_dir=None)
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None
    monitored._release()


CACHE = {}


def test_each_trace_finds_the_caches_that_training_finds():
    def cached(model, batch):
        if "mask" not in CACHE:
            CACHE["mask"] = torch.ones(8)
        return loss_of(model, batch * CACHE["mask"])

    model, optimizer = parts()
    step = mc.TrainingStep(model, torch.ones(4, 8), loss=cached, optimizer=optimizer)
    prediction = mc.predict(step, device="24GiB")
    assert prediction.trace.is_any_batch_size_known, prediction.caveats
    assert CACHE == {}


class Counting(TorchDispatchMode):
    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("isolate", [True, False])
def test_modes_of_the_users_see_nothing_of_a_prediction(isolate):
    model, optimizer = parts()
    step = mc.TrainingStep(model, torch.ones(4, 8), loss=loss_of, optimizer=optimizer)
    expected = mc.predict(step, device="24GiB")
    with Counting() as mode:
        assert mc.predict(step, device="24GiB", isolate=isolate) == expected
    assert mode.num_calls == 0


KEPT = []


class Keeps(nn.Linear):
    def forward(self, x):
        KEPT.append(x)
        return super().forward(x)


def test_in_this_process_what_holds_fake_tensors_is_named():
    model = Keeps(8, 4)
    step = mc.TrainingStep(model, torch.ones(4, 8), loss=loss_of, optimizer=torch.optim.SGD)
    with pytest.warns(MemoryWarning, match=re.escape("test_training_goes_on.KEPT holds fake")):
        mc.predict(step, device="24GiB", isolate=False)
    KEPT.clear()
    mc.predict(step, device="24GiB")
    assert KEPT == []


@pytest.mark.parametrize("isolate", [True, False])
def test_a_fake_tensor_has_no_address(isolate):
    def reading(model, batch):
        batch.data_ptr()
        return loss_of(model, batch)

    model, optimizer = parts()
    step = mc.TrainingStep(model, torch.ones(4, 8), loss=reading, optimizer=optimizer)
    with pytest.raises(mc.PredictionError, match="no memory to point to"):
        mc.predict(step, device="24GiB", isolate=isolate)
    with pytest.warns(MemoryWarning, match="not predicted.*no memory to point to"):
        mc.MemoryLog(
            mc.MemoryRecorder(model, optimizer),
            step,
            log_dir=None,
            isolate=isolate,
            wait_for_prediction=True,
        )


def test_every_function_that_predicts_leaves_the_program_alone():
    calls = []

    def counting(model, batch):
        calls.append(1)
        return loss_of(model, batch)

    class Calls(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    model = Calls(8, 4)
    step = mc.TrainingStep(model, torch.ones(4, 8), loss=counting, optimizer=torch.optim.SGD)
    assert mc.predict(step, device="24GiB").fits
    assert mc.suggest_batch_size(step, device="1GiB").batch_size
    assert mc.what_if(step, device="1GiB").tried
    assert mc.layers(model, torch.ones(4, 8)).num_parameters == 36
    assert calls == []


@pytest.mark.cuda
def test_a_step_is_predicted_after_training_on_cuda():
    """Autograd refuses to run in a usual fork then."""
    model, _ = parts()
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(4, 8, device="cuda")
    step = mc.TrainingStep(model, batch, loss=loss_of, optimizer=torch.optim.Adam)
    before = mc.predict(step, device="cuda")
    train(model, optimizer, batch=batch)
    assert mc.predict(step, device="cuda") == before


def test_training_beside_a_prediction_copies_no_parameters(tmp_path):
    """Pages that a forked child shares are copied as the training writes them."""
    resource = pytest.importorskip("resource")

    def num_page_faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    side = 2048
    model = torch.nn.Linear(side, side, bias=False)
    num_pages = model.weight.nbytes // resource.getpagesize()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mc.TrainingStep(model, torch.ones(4, side), loss=hanging, optimizer=optimizer)
    log = mc.MemoryLog(mc.MemoryRecorder(model, optimizer), step, log_dir=tmp_path, timeout_s=2)
    num_before = num_page_faults()
    with torch.no_grad():
        model.weight += 1
    assert num_page_faults() - num_before < num_pages / 2
    assert torch.equal(model.weight, before + 1)
    with pytest.warns(MemoryWarning, match="longer than 2 s"):
        log.close()
