"""A callback or a log is copied and pickled before, in and after a training, which goes on."""

import copy
import pickle

import pytest
import torch
import training
from lightning.pytorch import Callback
from torch import nn

import memcallback as mc
from memcallback.record.pending import PendingPrediction

WAYS = [copy.copy, copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))]
SAVINGS = {"accumulate": 2, "amp": "bf16-mixed", "checkpoint": ["network"]}
HOOKS = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_end",
    "teardown",
)


class Copying(Callback):
    """Copies a callback in every hook, each time after the callback's own."""

    def __init__(self, copied, way):
        self.copies = {}
        for hook in HOOKS:
            setattr(self, hook, lambda *_, hook=hook, **__: self.copies.update({hook: way(copied)}))


def fit(tmp_path, *callbacks, num_batches=4):
    torch.manual_seed(0)
    module = training.Automatic()
    training.trainer(tmp_path, list(callbacks), log_every_n_steps=1).fit(
        module, training.loader(num_batches)
    )
    return module


def numbers_of(module):
    return [parameter.detach().sum().item() for parameter in module.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_from_any_moment_of_a_fit_runs_a_fit_of_its_own(way, tmp_path):
    options = {"per_module": True, **SAVINGS}
    plain = mc.MemoryCallback(**options)
    expected = numbers_of(fit(tmp_path, plain))
    callback = mc.MemoryCallback(**options)
    copying = Copying(callback, way)
    assert numbers_of(fit(tmp_path, callback, copying)) == expected
    assert len(callback.recorder.steps) == 4
    assert set(copying.copies) == set(HOOKS)
    copied = copying.copies["on_before_backward"]
    assert numbers_of(fit(tmp_path, copied)) == expected
    assert len(copied.recorder.steps) == 4
    assert copied.prediction == callback.prediction


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_the_results_and_shares_nothing_live(way, tmp_path):
    callback = mc.MemoryCallback(per_module=True)
    copying = Copying(callback, way)
    fit(tmp_path, callback, copying)
    for after in (copying.copies["on_train_end"], copying.copies["teardown"], way(callback)):
        assert after.prediction == callback.prediction
        assert after.report == callback.report
        assert after.recorder.steps == callback.recorder.steps
        assert after.recorder.modules == callback.recorder.modules
        assert after.recorder.report(after.prediction).measured == callback.report.measured
        assert after.state_dict() == callback.state_dict()
    for during in copying.copies.values():
        if during.recorder is not None:
            assert not during.recorder.models
            assert not during.recorder.is_in_step
    assert len(copying.copies["on_train_batch_end"].recorder.steps) == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_in_a_training_waits_for_no_prediction(way, tmp_path, monkeypatch):
    waited = []
    wait = PendingPrediction.wait

    def note(self, seconds):
        waited.append(seconds)
        return seconds != 0 and wait(self, seconds)  # who does not wait does not get it

    monkeypatch.setattr(PendingPrediction, "wait", note)

    class Noting(Callback):
        def on_train_batch_end(self, *_):
            before = len(waited)
            way(callback)
            assert len(waited) == before

    callback = mc.MemoryCallback()
    fit(tmp_path, callback, Noting())
    assert waited
    assert way(callback).prediction == callback.prediction is not None


@pytest.mark.parametrize("way", WAYS)
def test_a_callback_that_has_not_run_is_copied_with_its_settings(way, tmp_path):
    callback = way(mc.MemoryCallback(batch_size=8, device="24GiB", predict=False))
    fit(tmp_path, callback)
    assert callback.prediction is None
    assert callback.report.device.capacity_bytes == 24 * 2**30


@pytest.mark.parametrize("way", WAYS)
def test_a_log_is_copied_closed_and_goes_on_itself(way):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = mc.MemoryRecorder(model, optimizer)
    step = mc.TrainingStep(model, torch.ones(2, 4), optimizer=optimizer)
    copies = []
    with mc.MemoryLog(recorder, step, log_dir=None) as log, recorder.watch():
        for _ in range(3):
            copies.append(way(log))
            model(torch.ones(2, 4)).sum().backward()
            copies.append(way(log))
            optimizer.step()
            optimizer.zero_grad()
    assert len(recorder.steps) == 3
    copies.append(way(log))
    assert copies[-1].report == log.report
    assert copies[-1].prediction == log.prediction is not None
    for copied in copies:
        with copied:
            pass
    with pytest.raises(KeyError), copies[0]:
        raise KeyError


def test_a_trainer_that_spawns_its_processes_records_in_each(tmp_path):
    """`ddp_spawn` pickles the Trainer with its callbacks."""
    callback = mc.MemoryCallback(predict=False)
    told = Told(str(tmp_path))
    training.trainer(
        tmp_path, [callback, told], strategy="ddp_spawn", accelerator="cpu", devices=2
    ).fit(training.Automatic(), training.loader(4))
    assert sorted(path.read_text() for path in tmp_path.glob("told_*")) == ["2", "2"]


class Told(Callback):
    """Writes down how many steps were recorded in its process."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        recorded = next(one for one in trainer.callbacks if isinstance(one, mc.MemoryCallback))
        with open(f"{self.folder}/told_{trainer.global_rank}", "w", encoding="utf-8") as file:
            file.write(str(len(recorded.recorder.steps)))
