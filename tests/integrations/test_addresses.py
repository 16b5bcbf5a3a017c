"""Where our files go if the user names an address of fsspec."""

import fsspec
import pytest
import torch
import training
from torch import nn

import memcallback as mc


@pytest.fixture
def store(tmp_path, monkeypatch):
    """What is at memory:// addresses, in a working directory that must stay empty."""
    monkeypatch.chdir(tmp_path)
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system.store
    system.store.clear()
    assert list(tmp_path.iterdir()) == []


class Hungry(training.Automatic):
    """Runs out of memory in its second step."""

    def training_step(self, batch, batch_idx):
        if batch_idx:
            torch.empty(2**60, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


def fit(module):
    callback = mc.MemoryCallback()
    training.trainer("memory://bucket/runs", [callback]).fit(module, training.loader(3))
    return callback


def test_a_run_of_the_callback_is_at_the_address_of_the_trainer(store, capsys):
    fit(training.Automatic())
    assert " --logdir memory://bucket/runs/memcallback/version_0" in (capsys.readouterr().out)
    runs = [path for path in store if path.startswith("/bucket/runs/memcallback/version_0/")]
    assert len([path for path in runs if "events.out.tfevents" in path]) == 3  # predicted, capacity


def test_an_out_of_memory_report_is_beside_it(store):
    with pytest.raises(RuntimeError, match="allocate memory"):
        fit(Hungry())
    folder = "/bucket/runs/memcallback/version_0"
    assert store[f"{folder}/out_of_memory_step2.md"].getvalue().startswith(b"# Out of memory")
    assert f"{folder}/out_of_memory_step2.json" in store


def test_a_log_takes_an_address(store):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = mc.MemoryRecorder(model, optimizer)
    with mc.MemoryLog(recorder, log_dir="memory://bucket/logs"), recorder.watch():
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert any(path.startswith("/bucket/logs/version_0/") for path in store)
