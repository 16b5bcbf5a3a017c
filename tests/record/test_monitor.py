"""What `Monitor` does for every callback alike, and what a recorder hands to its listeners."""

import gc
import weakref

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.record.monitor import Monitor
from memcallback.record.oom_response import forget_explained, is_new_shortage
from memcallback.record.settings import MonitorSettings


def train_step(recorder, model, batch):
    with recorder.step(batch), recorder.phase(mc.Phase.FORWARD):
        model(batch)


@pytest.fixture
def model():
    return nn.Linear(4, 4)


@pytest.fixture
def recorder(model):
    return mc.MemoryRecorder(model)


def test_a_batch_of_unknown_size_gives_one_warning_and_no_prediction(recorder, model):
    def make_step():
        raise AssertionError("the step is not predicted")

    settings = MonitorSettings(owner="Loop", without_prediction="Loop(predict=False)")
    monitor = Monitor(recorder, settings, print_fn=print, folder=None, is_main=False)
    with pytest.warns(mc.MemoryWarning, match=r"cannot be inferred.*Loop\(batch_size=32\)") as all:
        monitor.begin(make_step, model=model, batch={"scale": torch.tensor(1.0)})
    assert len(all) == 1
    assert monitor.prediction is None


def test_a_monitor_that_is_closed_keeps_nothing_of_its_loop(recorder, model):
    class Loop:
        def on_predicted(self, prediction, more):
            pass

    loop = Loop()
    settings = MonitorSettings(owner="Loop", without_prediction="Loop(predict=False)")
    monitor = Monitor(recorder, settings, print_fn=print, folder=None, is_main=False)
    step = mc.TrainingStep(model, torch.ones(2, 4), loss=lambda model, batch: model(batch).sum())
    monitor.begin(lambda: step, model=model, on_predicted=loop.on_predicted)
    assert monitor.prediction is not None
    monitor.close()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        MonitorSettings(owner="Loop", without_prediction="", batch_size=0)
    with pytest.raises(ValueError, match="headroom"):
        MonitorSettings(owner="Loop", without_prediction="", headroom=1)


def test_a_listener_gets_the_batch_of_the_step(recorder, model):
    batches = []

    class Listener:
        prediction = None

        def wants_step(self):
            return True

        def on_step(self, record, batch):
            batches.append(batch)

        def close(self):
            pass

    recorder.listen(Listener())
    batch = torch.ones(2, 4)
    train_step(recorder, model, batch)
    assert len(batches) == 1
    assert batches[0] is batch


def test_a_report_names_the_rank_in_every_loop(recorder, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(MemoryError), recorder.step(torch.ones(2, 4)):
        raise MemoryError
    assert recorder.out_of_memory.rank == 1


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_an_error_is_explained_once_and_not_changed(recorder, kind, capsys):
    forget_explained()  # of earlier tests; MemoryError allows no weak reference
    error = kind("out of memory")
    assert is_new_shortage(error)
    recorder.failed(error)
    recorder.failed(error)
    assert capsys.readouterr().err.count("Out of memory on CPU") == 1
    assert not vars(error)
    assert not is_new_shortage(error)
    forget_explained()
    # One that is still alive is known; of a MemoryError only its number, which another can have.
    assert is_new_shortage(error) == (kind is MemoryError)
    assert not is_new_shortage(ValueError("out of memory"))
