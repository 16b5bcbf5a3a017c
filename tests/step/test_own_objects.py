"""What the user's own objects keep of a trace is put back, and nothing else of them."""

import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memcallback as mc
from memcallback.step.copies.program import untouched_program


class Remembers:
    """A loss with attributes of its own, one of them an object with attributes."""

    last = None

    def __init__(self):
        self.history, self.counter = [1.0], SimpleNamespace(calls=0, last=None)

    def __call__(self, model, batch):
        self.last = self.counter.last = model(batch)
        self.new = True
        self.history.append(self.last)
        self.counter.calls += 1

    method = __call__


REMEMBERS = Remembers()


@pytest.mark.parametrize("how", ["object", "method", "closure", "global variable"])
def test_an_object_that_keeps_fakes_is_as_it_was(how):
    remembers = REMEMBERS if how == "global variable" else Remembers()

    def calls(model, batch):
        remembers(model, batch)

    loss = {"object": remembers, "method": remembers.method, "closure": calls}.get(how)
    before = vars(remembers)
    with untouched_program([loss] if loss else []):
        with FakeTensorMode():
            remembers(nn.Identity(), torch.zeros(2, 3))
        assert remembers.counter.calls == len(remembers.history) - 1 == 1
    assert vars(remembers) is before
    assert before == {"history": [1.0], "counter": SimpleNamespace(calls=0, last=None)}


def keeps_in_a_default():
    state = SimpleNamespace(last=None)

    def loss(output, state=state):
        state.last = output

    return loss, lambda: state.last


def keeps_in_a_partial():
    state = SimpleNamespace(last=None)
    loss = partial(lambda state, output: setattr(state, "last", output), state)
    return loss, lambda: state.last


def keeps_in_an_attribute_of_the_function():
    def loss(output):
        loss.last = output

    return loss, lambda: getattr(loss, "last", None)


def keeps_in_a_nested_list():
    state = SimpleNamespace(history={"train": []})
    return lambda output: state.history["train"].append(
        output
    ), lambda: state.history["train"] or None


def keeps_in_a_module():
    state = SimpleNamespace(model=None)

    def loss(output):
        state.model = nn.Sequential(nn.Identity())
        state.model[0].register_buffer("last", output)

    return loss, lambda: state.model


def keeps_behind_much_data():
    state = SimpleNamespace(
        table=[list(range(number, number + 100)) for number in range(0, 6000, 100)],
        rows=[(number, 0.0, 0.0, 0.0) for number in range(2500)],
        inner=SimpleNamespace(last=None),
    )

    def loss(output):
        state.inner.last = output
        state.rows.append((0, output))

    def kept():
        return None if state.inner.last is None and len(state.rows) == 2500 else state

    return loss, kept


@pytest.mark.parametrize(
    "make",
    [
        keeps_in_a_default,
        keeps_in_a_partial,
        keeps_in_an_attribute_of_the_function,
        keeps_in_a_nested_list,
        keeps_in_a_module,
        keeps_behind_much_data,
    ],
)
def test_what_a_function_keeps_anywhere_is_put_back(make):
    loss, kept = make()
    with untouched_program([loss]):
        loss(FakeTensorMode().from_tensor(torch.ones(2)))
        assert kept() is not None
    assert kept() is None


def test_what_a_program_does_once_and_notes_is_not_done_again():
    noted = SimpleNamespace(is_registered=False, names=[])
    with untouched_program([lambda: noted]):
        noted.is_registered = True
        noted.names.append("operator")
    assert noted == SimpleNamespace(is_registered=True, names=["operator"])


OPENED = []


class Lazy:
    """Opens a database when its class is asked for."""

    @property
    def __class__(self):
        OPENED.append(True)
        raise RuntimeError("no database")


def test_objects_that_cannot_be_read_are_left_alone():
    gone = Remembers()
    holder = SimpleNamespace(proxy=weakref.proxy(gone), lazy=Lazy(), last=None)
    del gone
    with untouched_program([lambda: holder]):
        holder.last = FakeTensorMode().from_tensor(torch.ones(2))
    assert holder.last is None
    assert not OPENED


class AddsTheLast(nn.Module):
    """Keeps what a forward pass leaves for the next one in a global object."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        x, last = self.layer(x), REMEMBERS.last
        REMEMBERS.last = x.detach()
        return x if last is None else x + last


def test_a_model_that_keeps_tensors_in_a_global_object_is_predicted_at_any_size(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)

    def predicted(num_samples):
        step = mc.TrainingStep(AddsTheLast(), torch.zeros(num_samples, 64))
        return mc.predict(step, device="24GiB")

    assert predicted(32).at(80).step.windows == predicted(80).step.windows
    assert REMEMBERS.last is None
