"""Ctrl-C and time limits while an error is reported end the training, with everything tidy."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

import pytest
import torch
import training
from torch import nn

import memcallback as mc


class Striking:
    """A listener; something strikes whoever waits for its prediction."""

    def __init__(self, strike):
        self.strike = strike

    @property
    def prediction(self):
        self.strike()

    def wants_step(self):
        return False

    def on_step(self, record, batch):
        pass

    def on_out_of_memory(self, report, error):
        pass

    def close(self):
        pass


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def reach_time_limit():
    signal.raise_signal(signal.SIGALRM)


def fail():
    raise ValueError("no prediction of it")


@pytest.fixture
def time_limit():
    def end(number, frame):
        raise TimeoutError("the time is over")

    before = signal.signal(signal.SIGALRM, end)
    yield
    signal.signal(signal.SIGALRM, before)


def loop(strike):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = mc.MemoryRecorder(model, optimizer)
    recorder.listen(Striking(strike))
    return model, optimizer, recorder


def train_once(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def run_out(model, optimizer=None, *, num_updates=0):
    for _ in range(num_updates):
        train_once(model, optimizer)
    model(torch.ones(2, 4))
    raise MemoryError


STRIKES = {
    "Ctrl-C": (press_ctrl_c, KeyboardInterrupt),
    "a time limit": (reach_time_limit, TimeoutError),
    "an error of ours": (fail, MemoryError),
}


@pytest.fixture(params=STRIKES)
def struck(request, time_limit):
    return STRIKES[request.param]


def test_a_watch_leaves_nothing_behind(struck):
    strike, kind = struck
    before = sys.excepthook, torch.autograd.backward
    model, optimizer, recorder = loop(strike)
    with pytest.raises(kind), recorder.watch():
        run_out(model)
    assert (sys.excepthook, torch.autograd.backward) == before
    train_once(model, optimizer)
    assert not recorder.is_in_step
    assert [step.is_interrupted for step in recorder.steps] == [True]


def test_the_next_step_is_recorded(struck):
    strike, kind = struck
    model, optimizer, recorder = loop(strike)
    with pytest.raises(kind), recorder.step(batch_size=2):
        raise MemoryError
    with recorder.step(batch_size=2):
        train_once(model, optimizer)
    assert [step.is_interrupted for step in recorder.steps] == [True, False]


def test_a_log_writes_its_last_report(struck, capsys):
    strike, kind = struck
    model, optimizer, recorder = loop(strike)
    log = mc.MemoryLog(recorder, log_dir=None)
    with pytest.raises(kind), log, recorder.watch():
        run_out(model, optimizer, num_updates=3)
    assert log.report.notes[-1].startswith("The training ended with ")
    assert "3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("strike", [press_ctrl_c, reach_time_limit])
def test_a_fit_undoes_its_savings(strike, time_limit, tmp_path):
    class Callback(mc.MemoryCallback):
        prediction = property(lambda self: strike())

    class Short(training.Automatic):
        def on_after_backward(self):
            if self.trainer.global_step == 1:
                raise MemoryError

    callback = Callback(predict=False, accumulate=2)
    trainer = training.trainer(tmp_path, [callback], max_steps=3)
    with pytest.raises((KeyboardInterrupt, TimeoutError, SystemExit)):
        trainer.fit(Short(), training.loader())
    assert trainer.accumulate_grad_batches == 1
    assert not callback.recorder.is_in_step
    assert callback.report is not None


@pytest.mark.parametrize(
    "function",
    [
        "record.recorder.MemoryRecorder.count_beside",
        "diagnose.out_of_memory.explain.explain",
        "record.oom_response.write_file",
        "savings.what_if.rescues",
        "report.training_page.training_page",
    ],
)
def test_a_time_limit_in_the_middle_of_our_work_ends_the_training(
    function, time_limit, tmp_path, monkeypatch
):
    monkeypatch.setattr(f"memcallback.{function}", lambda *_, **__: reach_time_limit())
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = mc.MemoryRecorder(model, optimizer)
    step = mc.TrainingStep(model, torch.ones(2, 4), loss=lambda m, x: m(x).sum())

    logs = []

    def train():
        logs.append(mc.MemoryLog(recorder, step, log_dir=tmp_path, isolate=False))
        with logs[0], recorder.watch():
            train_once(model, optimizer)
            if "training_page" not in function:
                run_out(model)

    with pytest.raises(TimeoutError):
        train()
    if function in ("record.oom_response.write_file", "savings.what_if.rescues"):
        assert logs[0].out_of_memory.batch_size == 2


class Stopped(nn.Linear):
    """Ctrl-C is pressed in its first call; later ones call it again for the sum of the inputs."""

    num_calls = 0

    def forward(self, features):
        self.num_calls += 1
        if self.num_calls == 1:
            press_ctrl_c()
        inner = self(features.sum(0, keepdim=True)) if len(features) > 1 else 0
        return super().forward(features) + inner


def test_after_ctrl_c_in_a_forward_pass_the_next_step_is_one_of_its_own():
    model = Stopped(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = mc.MemoryRecorder(model, optimizer)
    recorder.watch()
    for batch_size in (2, 3, 3):
        with suppress(KeyboardInterrupt):
            model(torch.ones(batch_size, 4)).sum().backward()
            optimizer.step()
    steps = [(step.batch_size, step.is_interrupted) for step in recorder.steps]
    assert steps == [(2, True), (3, False), (3, False)]
    recorder.close()
