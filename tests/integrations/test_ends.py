"""Who may end a training: a signal, and its own code; no logger, and no user code in our calls."""

import os
import signal
import sys

import pytest
import torch
import training
from lightning.pytorch.loggers.logger import DummyLogger
from torch._subclasses.fake_tensor import FakeTensor

import memcallback as mc
from memcallback.record.monitor import Monitor


def leave():
    sys.exit(3)


def interrupt():
    raise KeyboardInterrupt


class Leaving(DummyLogger):
    """Ends the program as soon as it gets one of our values."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def log_metrics(self, metrics, step=None):
        if any(name.startswith("memory") for name in metrics):
            self.end()


class LeavingOnFakes(training.Automatic):
    """Ends the program where its step is traced."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def training_step(self, batch, batch_idx):
        if isinstance(batch[0], FakeTensor):
            self.end()
        return super().training_step(batch, batch_idx)


def fit(tmp_path, module, *callbacks, **options):
    torch.manual_seed(0)
    trainer = training.trainer(tmp_path, list(callbacks), log_every_n_steps=1, **options)
    trainer.fit(module, training.loader(3))
    return trainer


@pytest.mark.parametrize("end", [leave, interrupt])
def test_a_logger_that_ends_the_program_is_left_out(end, tmp_path):
    callback = mc.MemoryCallback(predict=False)
    with pytest.warns(mc.MemoryWarning, match="Leaving gets no more memory values"):
        trainer = fit(tmp_path, training.Automatic(), callback, logger=Leaving(end))
    assert trainer.global_step == 3
    assert len(callback.recorder.steps) == 3


@pytest.mark.parametrize("end", [leave, interrupt])
def test_a_step_that_ends_the_program_where_it_is_traced_is_not_predicted(end, tmp_path):
    callback = mc.MemoryCallback()
    with pytest.warns(mc.MemoryWarning, match="The step could not be traced"):
        trainer = fit(tmp_path, LeavingOnFakes(end), callback)
    assert trainer.global_step == 3
    assert len(callback.recorder.steps) == 3


@pytest.mark.parametrize("end", [leave, interrupt])
def test_predict_says_that_a_step_ends_the_program(end):
    batch = next(iter(training.loader(1)))
    step = mc.TrainingStep.from_lightning(LeavingOnFakes(end), batch)
    with pytest.raises(
        mc.PredictionError,
        match=r"in the forward, at .*test_ends.py:\d+ in \w+: (SystemExit: 3|KeyboardInterrupt)",
    ):
        mc.predict(step, device="24GiB")


class Stopped(Exception):
    """A scheduler's time limit."""


def test_a_signal_that_arrives_in_a_hook_of_ours_ends_the_training(tmp_path, monkeypatch):
    def stop(number, frame):
        raise Stopped

    def on_step(*_, **__):
        os.kill(os.getpid(), signal.SIGUSR1)
        while True:  # until the handler runs
            pass

    before = signal.signal(signal.SIGUSR1, stop)
    monkeypatch.setattr(Monitor, "on_step", on_step)
    try:
        with pytest.raises(Stopped):
            fit(tmp_path, training.Automatic(), mc.MemoryCallback(predict=False))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_arrives_in_a_trial_ends_the_search_for_a_batch_size(tmp_path):
    class Slow(training.Automatic):
        def training_step(self, batch, batch_idx):
            if not isinstance(batch[0], FakeTensor):
                os.kill(os.getpid(), signal.SIGUSR1)
                while True:  # until the handler runs
                    pass
            return super().training_step(batch, batch_idx)

    def stop(number, frame):
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    callback = mc.MemoryCallback(predict=False, fit_batch_size=True, device="24GiB")
    try:
        with pytest.raises(Stopped):
            fit(tmp_path, Slow(), callback)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert callback.fitted is None
    assert callback.recorder is None  # the training did not begin


def test_ctrl_c_in_a_hook_of_ours_ends_the_training(tmp_path, monkeypatch):
    def on_step(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Monitor, "on_step", on_step)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    callback = mc.MemoryCallback(predict=False)
    # Newer versions of Lightning end the program, older ones return from fit.
    try:
        trainer = fit(tmp_path, training.Automatic(), callback)
    except (SystemExit, KeyboardInterrupt):
        num_steps = len(callback.recorder.steps)
    else:
        num_steps = trainer.global_step
    finally:  # Lightning ignores Ctrl-C from then on
        signal.signal(signal.SIGINT, before)
    assert num_steps <= 1
