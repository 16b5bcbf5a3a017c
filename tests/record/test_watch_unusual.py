"""Watched loops with unusual batches, models, threads and hooks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.core.tensors import tensors_in
from memcallback.record.watch import listen_for_errors
from memcallback.step.batch import infer_batch_size


class OfADataSet:
    """A batch that refers to its data set."""

    def __init__(self):
        self.x = torch.zeros(3, 2)
        self.dataset = [{"item": number} for number in range(100_000)]


def test_a_batch_that_refers_to_its_data_set_is_not_searched_to_the_end():
    batch = OfADataSet()
    assert infer_batch_size(batch).batch_size == 3
    batch.dataset.append(torch.zeros(7, 2))
    assert [len(tensor) for tensor in tensors_in(batch, most=1_000)] == [3]
    assert [len(tensor) for tensor in tensors_in(batch)] == [3, 7]


def test_layers_that_get_their_size_from_the_first_batch_are_recorded():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
    recorder = mc.MemoryRecorder(model, torch.optim.SGD(nn.ParameterList([torch.ones(1)]), lr=0.1))
    optimizers = []
    with recorder.watch():
        for _ in range(3):
            model(torch.rand(4, 2)).sum().backward()
            optimizers = optimizers or [torch.optim.SGD(model.parameters(), lr=0.1)]
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert len(recorder.steps) == 3


class Listener:
    def listen(self, error):
        pass


def test_hooks_of_uncaught_errors_that_call_each_other_print_an_error_once(monkeypatch):
    printed, error = [], ValueError("of the user")
    monkeypatch.setattr(sys, "__excepthook__", lambda kind, error, traceback: printed.append(error))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    end_second = hooks_in_turns(monkeypatch)
    sys.excepthook(ValueError, error, None)
    end_second()
    assert printed == [error]


def hooks_in_turns(monkeypatch):
    """Ours, over it another package's that calls it, and over that ours again."""
    first, second = Listener(), Listener()
    end_first = listen_for_errors(first.listen)
    found = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *error: found(*error))
    end_first()
    return listen_for_errors(second.listen)


def test_the_programs_own_hook_of_uncaught_errors_is_called_in_every_case(monkeypatch):
    heard, error = [], ValueError("of the user")

    def own(kind, error, traceback):
        heard.append(error)

    monkeypatch.setattr(sys, "excepthook", own)
    end = hooks_in_turns(monkeypatch)
    sys.excepthook(ValueError, error, None)
    end()
    assert heard == [error]
    # Those that end in the order in which they began leave it as it was.
    monkeypatch.setattr(sys, "excepthook", own)
    first, second = Listener(), Listener()
    ends = [listen_for_errors(each.listen) for each in (first, second)]
    for end in ends:
        end()
    assert sys.excepthook is own


@pytest.mark.parametrize("ended_by", ["nobody", "another thread"])
@pytest.mark.parametrize("of", ["the main thread", "a thread"])
def test_a_step_that_is_still_open_at_the_end_leaves_the_exit_status(of, ended_by, tmp_path):
    program = f"""
import sys, threading
import torch
import memcallback as mc

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
recorder = mc.MemoryRecorder(model, optimizer, sample_every_n_steps=1)
watch = recorder.watch()

def train():
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    model(torch.ones(4, 8))  # the next step has begun

def run(function, by_thread):
    if by_thread:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    else:
        function()

by_thread = {of == "a thread"}
run(train, by_thread)
if {ended_by == "another thread"}:
    run(recorder.close, not by_thread)
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(mc.__file__).parents[1])},
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
