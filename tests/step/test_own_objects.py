"""What the user's own objects are and hold is put back after each attempt to trace a step."""

import enum
import importlib
import sys
import weakref
from collections import Counter, OrderedDict, namedtuple
from functools import lru_cache, partial
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


def test_counters_and_flags_are_as_they_were():
    noted = SimpleNamespace(calls=0, names=[], inner=SimpleNamespace(is_ready=False))
    with untouched_program([lambda: noted]):
        noted.calls += 1
        noted.names.append("operator")
        noted.inner.is_ready = True
    assert noted == SimpleNamespace(calls=0, names=[], inner=SimpleNamespace(is_ready=False))


def test_the_order_of_a_dictionary_comes_back():
    holder = SimpleNamespace(seen=OrderedDict(a=1, b=2), rows={"a": 1, "b": 2})
    with untouched_program([lambda: holder]):
        holder.seen.move_to_end("a")
        holder.rows["a"] = holder.rows.pop("a")
    assert list(holder.seen) == list(holder.rows) == ["a", "b"]


class Mode(enum.Enum):
    """Its members are objects of the user's, too."""

    TRAIN = 1


class Settings:
    """Holds an object in an attribute of the class."""

    shared = SimpleNamespace(last=None)


MANY = [SimpleNamespace(last=None) for _ in range(101)]
Mode.TRAIN.last = None


@pytest.mark.parametrize(
    "holder", [Mode.TRAIN, Settings.shared, MANY[100]], ids=["member", "class", "list of many"]
)
def test_objects_among_the_attributes_of_classes_and_in_lists_are_reached(holder):
    with untouched_program():
        holder.last = 1
    assert holder.last is None


def test_variables_of_closures_that_objects_hold_come_back():
    def counter():
        number, rows = 0, {"train": []}

        def counts():
            nonlocal number
            number += 1
            rows["train"].append(number)
            return number, rows["train"]

        return counts

    holder = SimpleNamespace(counts=counter())
    with untouched_program([lambda: holder]):
        holder.counts()
    assert holder.counts() == (1, [1])


class Attributes(dict):
    """A dictionary that is its own attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Guarded:
    """Says itself what its attributes are, and notes that it was asked."""

    __slots__ = ("opened",)

    def __init__(self):
        self.opened = []

    @property
    def __dict__(self):
        self.opened.append(True)
        return {}


CONFIG, GUARDED = Attributes(rate=0.1), Guarded()


def test_objects_with_attributes_of_another_kind_are_left_alone():
    with untouched_program([lambda: (CONFIG, GUARDED)]):
        CONFIG.rate = 0.2
    assert CONFIG.rate == 0.2
    # Nor has any search of another test that came past asked it.
    assert not GUARDED.opened


def remembers_in_a_default(number, cache={}):  # noqa: B006  # as programs do
    return cache.setdefault("number", number)


def memorized(function):
    kept = {}

    def wrapped(number):
        return kept.setdefault("number", function(number))

    return wrapped


@memorized
def remembers_in_a_closure(number):
    return number


@lru_cache
def remembers_in_a_cache():
    return len(MADE)


def remembers_in_itself(number):
    remembers_in_itself.number = getattr(remembers_in_itself, "number", number)
    return remembers_in_itself.number


class WithMethods(nn.Module):
    """Its methods keep something, too."""

    forward = staticmethod(memorized(lambda number: number))


class Row(namedtuple("Row", "kept")):
    """A tuple with attributes."""


ROW, COUNTS, MADE, MODULES = Row([]), Counter(), [], sys.modules
CACHED = Settings()
CACHED.made, CACHED.number = lru_cache(lambda number: object()), 0


@pytest.mark.parametrize(
    "function",
    [
        remembers_in_a_default,
        remembers_in_a_closure,
        remembers_in_itself,
        WithMethods.forward,
    ],
)
def test_what_global_functions_and_methods_keep_is_put_back(function):
    with untouched_program():
        assert function(1) == 1
    with untouched_program():
        assert function(2) == 2


def test_caches_counters_and_tuples_are_put_back():
    with untouched_program():
        remembers_in_a_cache()
        CACHED.made(1)
        CACHED.__dict__ = CACHED.__dict__ | {"number": 1}
        ROW.kept.append(1)
        COUNTS["calls"] += 1
        imported = importlib.import_module("wave")
    assert remembers_in_a_cache.cache_info().currsize == 0
    assert (CACHED.number, CACHED.made.cache_info().currsize) == (0, 0)
    assert ROW.kept == []
    assert COUNTS == {}
    assert MODULES["wave"] is imported


@lru_cache(maxsize=1)
def replaces_its_entry(number):
    return number


@lru_cache
@torch.no_grad()
def decorated(number):
    return number


def test_caches_of_decorated_functions_and_full_ones_are_emptied():
    replaces_its_entry(1)
    with untouched_program():
        replaces_its_entry(2)
        decorated(2)
    assert replaces_its_entry.cache_info().currsize == 0
    assert decorated.cache_info().currsize == 0


def test_what_a_library_registers_stays(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "shows_things"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import functools\n@functools.singledispatch\ndef show(it):\n    return 'default'\n"
    )
    (package / "plugin.py").write_text(
        "from shows_things import show\n@show.register\ndef _(it: int):\n    return 'int'\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    show = importlib.import_module("shows_things").show
    holder = SimpleNamespace(show=show)
    with untouched_program([show, lambda: holder]):
        importlib.import_module("shows_things.plugin")
    assert show(3) == "int"
    for name in ("shows_things", "shows_things.plugin"):
        monkeypatch.delitem(sys.modules, name)


class Refuses(type):
    """A class of it says itself what it has."""

    @property
    def __dict__(cls):
        raise RuntimeError("nothing")

    def __delattr__(cls, name):
        raise RuntimeError("it stays")


class Refusing(metaclass=Refuses):
    """Its attributes cannot be taken away."""


class Endless(namedtuple("Endless", "kept")):
    """A tuple that does not say how long it is."""

    def __len__(self):
        raise RuntimeError("no end")


ENDLESS, UNWRAPPED = Endless([]), lru_cache(lambda: 1)
del UNWRAPPED.__wrapped__


def test_what_cannot_be_read_or_put_back_leaves_the_rest_alone():
    with untouched_program([lambda: (Refusing, ENDLESS, UNWRAPPED)]):
        Refusing.more = 1
        ENDLESS.kept.append(1)
        REMEMBERS.last = 1
    assert REMEMBERS.last is None
    assert ENDLESS.kept == []


def test_objects_behind_very_many_others_are_put_back():
    many = [[SimpleNamespace(rows=[0]) for _ in range(1000)] for _ in range(40)]
    with untouched_program([*many, REMEMBERS]):
        REMEMBERS.last = 1
    assert REMEMBERS.last is None


class Lazy:
    """Opens a database when its class is asked for."""

    def __init__(self):
        self.opened = 0

    @property
    def __class__(self):
        self.opened += 1
        raise RuntimeError("no database")


def test_objects_that_cannot_be_read_are_left_alone():
    gone = Remembers()
    holder = SimpleNamespace(proxy=weakref.proxy(gone), lazy=Lazy(), last=None)
    del gone
    with untouched_program([lambda: holder]):
        holder.last = FakeTensorMode().from_tensor(torch.ones(2))
    assert holder.last is None
    assert not holder.lazy.opened


class AddsTheLast(nn.Module):
    """Keeps what a forward pass leaves for the next one in a global object."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        x, last = self.layer(x), REMEMBERS.last
        REMEMBERS.last = x.detach()
        return x if last is None else x + last


class WarmsUp:
    """A loss of which the first two are smaller."""

    calls = 0

    def __call__(self, model, batch):
        output = model(batch)
        self.calls += 1
        if self.calls <= 2:
            return output.mean()
        return torch.stack([output.tanh().exp().sigmoid() for _ in range(6)]).mean()


class MadeReady:
    """Notes in itself that another object has what it needs."""

    def __init__(self):
        self.is_ready, self.memory = False, SimpleNamespace(value=None)

    def __call__(self, model, batch):
        output = model(batch)
        if not self.is_ready:
            self.memory.value, self.is_ready = output.detach(), True
        return (output * self.memory.value.mean()).sum()


class KeepsTheLargest:
    """Keeps a tuple of a class of PyTorch's own."""

    last = None

    def __call__(self, model, batch):
        output = model(batch)
        loss = output.sum() if self.last is None else (output + self.last.values.sum()).sum()
        self.last = output.detach().max(dim=1)
        return loss


class DropsTheOldest:
    """A queue whose order decides which tensor goes."""

    def __init__(self):
        sizes = enumerate((1000, 10, 10, 10))
        self.queue, self.number = {number: torch.zeros(size, 64) for number, size in sizes}, 10

    def __call__(self, model, batch):
        output = model(batch)
        loss = output.mean()
        for kept in self.queue.values():
            loss = loss + (kept.exp() * output.mean()).mean()
        self.queue.pop(next(iter(self.queue)))
        self.queue[self.number] = output.detach()
        self.number += 1
        return loss


def predicted(model, num_samples, loss=None, device="NVIDIA A100-SXM4-80GB"):
    step = mc.TrainingStep(model, torch.zeros(num_samples, 64), loss=loss)
    return mc.predict(step, device=device)


@pytest.mark.parametrize("kind", [WarmsUp, MadeReady, KeepsTheLargest, DropsTheOldest])
def test_a_loss_with_a_memory_is_predicted_at_any_size(kind, monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    model = nn.Linear(64, 64)
    found = predicted(model, 32, kind())
    assert found.at(80).step.windows == predicted(model, 80, kind()).step.windows
    # All traces of a second architecture begin so, too.
    assert predicted(model, 32, kind(), device="80GiB").at(80).step.windows


def fails_on_the_largest_shape(output, kept):
    """Counts on the true shape of what a mask selects, and keeps what it has seen."""
    mask = torch.zeros(len(output))
    mask[:4] = 1
    more = torch.cat(kept).exp().mean() if kept else 0
    kept.append(output.detach().repeat(1, 16))
    return output[mask.bool()].view(4, 64).sum() + output.sum() + more


def test_a_second_attempt_finds_objects_as_the_first_did(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    holder, kept = SimpleNamespace(kept=[]), []

    def of_object(model, batch):
        return fails_on_the_largest_shape(model(batch), holder.kept)

    def of_closure(model, batch):
        return fails_on_the_largest_shape(model(batch), kept)

    first, second = (predicted(nn.Linear(64, 64), 4096, one) for one in (of_object, of_closure))
    assert first.peak_allocated_bytes == second.peak_allocated_bytes
    assert holder.kept == kept == []


def test_a_model_that_keeps_tensors_in_a_global_object_is_predicted_at_any_size(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    found = predicted(AddsTheLast(), 32)
    assert found.at(80).step.windows == predicted(AddsTheLast(), 80).step.windows
    assert REMEMBERS.last is None
