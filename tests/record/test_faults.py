"""What cannot be read is left out of a recording, and the loop goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback import Category, MemoryWarning, Phase


class Opaque(torch.Tensor):
    """A wrapper that does not say what is in it."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(getattr(arg, "inner", arg) for arg in args), **(kwargs or {}))


def trained(recorder, model, optimizer, batch):
    with recorder.step(batch, batch_size=2):
        with recorder.phase(Phase.FORWARD):
            loss = model(torch.ones(2, 4)).sum()
        with recorder.phase(Phase.BACKWARD):
            loss.backward()
        with recorder.phase(Phase.OPTIMIZER_STEP):
            optimizer.step()


@pytest.fixture
def parts():
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["a wrapper", "MKL-DNN"])
def test_a_tensor_without_a_storage_is_left_out(kind, parts):
    batch = torch.ones(2, 4)
    unreadable = Opaque(batch) if kind == "a wrapper" else batch.to_mkldnn()
    recorder = mc.MemoryRecorder(*parts)
    for _ in range(2):
        trained(recorder, *parts, [batch, unreadable])
    held = recorder.steps[-1].windows[0].start.by_category
    assert held[Category.INPUT] == batch.nbytes


@pytest.mark.parametrize("number", range(7))
def test_where_a_reading_fails_the_step_is_skipped_and_the_loop_goes_on(number, parts, monkeypatch):
    recorder = mc.MemoryRecorder(*parts)
    readings = iter(range(100))
    calls = {"begin": recorder.meter.begin, "read": recorder.meter.read, "end": recorder.meter.end}

    def failing(name):
        def call(*args):
            result = calls[name](*args)
            if next(readings) == number:
                raise RuntimeError("the device is gone")
            return result

        return call

    for name in calls:
        monkeypatch.setattr(recorder.meter, name, failing(name))
    before = parts[0].weight.clone()
    text = r"A step is not recorded\. RuntimeError: the device is gone"
    with pytest.warns(MemoryWarning, match=text):
        trained(recorder, *parts, None)
    assert not recorder.is_in_step
    assert not torch.equal(before, parts[0].weight)
    trained(recorder, *parts, None)
    assert len(recorder.steps) == 1


def test_misuse_is_an_error(parts):
    recorder = mc.MemoryRecorder(*parts)
    with recorder.step(batch_size=2):
        with pytest.raises(RuntimeError, match="A step is open already"), recorder.step():
            pass
        assert recorder.is_in_step
    with pytest.raises(ValueError, match="batch_size"), recorder.step(batch_size=0):
        pass
    assert len(recorder.steps) == 1
