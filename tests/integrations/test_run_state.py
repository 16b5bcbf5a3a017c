"""Everything that a training changes is put back, into the same objects."""

import contextlib
import copy
import functools
import io
import itertools
import random
import signal
import types
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from memcallback.integrations.lightning.fit.run_state import RunState

CPU = torch.device("cpu")


class Owner:
    """An object with attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self):
        self.count = 1


def restored(root, change):
    """What a root looks like after a change that was put back."""
    state = RunState(root, device=CPU)
    change(root)
    state.restore()
    return root


def test_parameters_buffers_and_what_shares_their_memory_are_put_back_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("average", torch.ones(4), persistent=False)
    view = model[0].weight.detach()[1:3]
    before = {
        name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    identities = {
        name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    pointer = model[0].weight.data_ptr()

    def change(root):
        root.model(torch.randn(8, 4)).sum().backward()
        torch.optim.SGD(root.model.parameters(), lr=1.0).step()
        root.model.average = torch.zeros(4)
        root.model[0].weight.requires_grad_(False)

    root = restored(Owner(model=model, view=view), change)
    after = dict((*root.model.named_parameters(), *root.model.named_buffers()))
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: id(value) for name, value in after.items()} == identities
    assert all(
        parameter.grad is None and parameter.requires_grad for parameter in root.model.parameters()
    )
    assert model[0].weight.data_ptr() == pointer == view.data_ptr() - view.storage_offset() * 4


def test_a_parameter_whose_memory_was_exchanged_has_its_own_again():
    model = nn.Linear(4, 4)
    pointer, values = model.weight.data_ptr(), model.weight.detach().clone()

    def change(model):
        model.double()
        model.weight.data.zero_()

    restored(model, change)
    assert model.weight.data_ptr() == pointer
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, values)


def test_a_single_bit_of_a_tensor_that_is_not_a_number_is_put_back():
    values = torch.tensor([float("nan"), -0.0, 0.0, float("inf")])
    bits = values.view(torch.int32).clone()
    restored(
        Owner(values=values),
        lambda root: root.values.copy_(torch.tensor([float("nan"), 0.0, -0.0, 1.0])),
    )
    assert torch.equal(values.view(torch.int32), bits)


def test_gradients_that_were_there_are_put_back():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    grad, values = model.weight.grad, model.weight.grad.clone()

    def change(model):
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad(set_to_none=True)

    restored(model, change)
    assert model.weight.grad is grad
    assert torch.equal(grad, values)


def test_an_optimizer_is_as_new_and_has_the_same_parameters():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    before = (optimizer.state_dict(), scheduler.state_dict())
    state_of = optimizer.state

    def change(root):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            root.optimizer.step()
            root.scheduler.step()

    restored(Owner(optimizer=optimizer, scheduler=scheduler), change)
    assert (optimizer.state_dict(), scheduler.state_dict()) == before
    assert optimizer.state is state_of
    assert not state_of
    assert optimizer.param_groups[0]["params"][0] is model.weight


CONTAINERS = {
    "list": ([1, [2]], lambda value: (value.append(3), value[1].append(4))),
    "dict": (
        {"b": 1, "a": [2]},
        lambda value: (value.pop("b"), value.update(c=3), value["a"].clear()),
    ),
    "ordered": (OrderedDict(b=1, a=2), lambda value: value.move_to_end("b")),
    "default": (
        defaultdict(list, a=[1]),
        lambda value: (value["b"].append(1), value["a"].append(2)),
    ),
    "deque": (deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "set": ({1, 2}, lambda value: (value.discard(1), value.add(3))),
    "tuple": (([1], 2), lambda value: value[0].append(2)),
    "namespace": (SimpleNamespace(a=1), lambda value: setattr(value, "b", 2)),
    "array": (np.arange(4.0), lambda value: value.fill(7)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_is_put_back_and_stays_itself(name):
    value, change = CONTAINERS[name]
    text = repr(value)
    root = restored(
        Owner(value=value), lambda root: (change(root.value), setattr(root, "value", None))
    )
    assert root.value is value
    assert repr(value) == text


def test_attributes_that_came_are_gone_and_those_that_went_are_back():
    root = Owner(count=1, gone=[1])

    def change(root):
        root.count += 1
        root.new = 3
        del root.gone

    restored(root, change)
    assert vars(root) == {"count": 1, "gone": [1]}


def test_slots_closures_partials_and_methods_are_followed():
    counts = {"closure": 0, "partial": [0]}
    slotted, number = Slotted(), 0

    def counted():
        nonlocal number
        number += 1
        counts["closure"] += 1

    def partially(numbers):
        numbers[0] += 1

    class Counter:
        total = 0

        def count(self):
            self.total += 1

    counter = Counter()
    root = Owner(
        slotted=slotted,
        hook=counted,
        partial=functools.partial(partially, counts["partial"]),
        method=counter.count,
    )

    def change(root):
        root.slotted.count, root.slotted.unset = 2, 3
        root.hook()
        root.partial()
        root.method()

    restored(root, change)
    assert (slotted.count, number, counts, counter.total) == (
        1,
        0,
        {"closure": 0, "partial": [0]},
        0,
    )
    assert not hasattr(slotted, "unset")


def test_every_random_generator_is_put_back():
    own = Owner(
        torch=torch.Generator().manual_seed(1),
        python=random.Random(1),
        new=np.random.default_rng(1),
        old=np.random.RandomState(1),
    )

    def draw(root):
        return (
            torch.rand(2, generator=root.torch).tolist(),
            root.python.random(),
            root.new.random(),
            root.old.rand(),
            torch.rand(2).tolist(),
            random.random(),
            np.random.rand(),
        )

    state = RunState(own, device=CPU)
    first = draw(own)
    assert draw(own) != first
    state.restore()
    assert draw(own) == first
    state.restore()
    assert draw(own) == first


def test_modes_of_pytorch_are_put_back():
    state = RunState(Counted(), device=CPU)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    state.restore()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_a_lazy_module_is_lazy_again():
    model = nn.LazyLinear(3)
    restored(model, lambda model: model(torch.ones(2, 5)))
    assert type(model) is nn.LazyLinear
    assert nn.parameter.is_lazy(model.weight)
    assert model(torch.ones(2, 7)).shape == (2, 3)


def test_what_is_to_be_left_alone_is():
    logger = Owner(rows=[])
    state = RunState(Owner(logger=logger), device=CPU, leave_alone=[logger])
    logger.rows.append(1)
    state.restore()
    assert logger.rows == [1]


def test_an_iterator_of_the_users_own_class_is_turned_back():
    class Stream:
        position = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.position += 1
            return self.position

    root = Owner(stream=Stream())
    restored(root, lambda root: next(root.stream))
    assert next(root.stream) == 1


def twice():
    yield from (1, 2)


def trial(root, step):
    """What a root looks like after a step in a trial."""
    with RunState(root, device=CPU).trial():
        step(root)
    return root


ITERATORS = {
    "list": lambda: iter([1, 2, 3]),
    "reversed": lambda: reversed([1, 2, 3]),
    "range": lambda: iter(range(3)),
    "dict": lambda: iter({1: 2, 3: 4}.items()),
    "set": lambda: iter({1}),
    "text": lambda: iter("abc"),
    "enumerate": lambda: enumerate(iter([1, 2])),
    "zip": lambda: zip(*[iter([1, 2, 3, 4])] * 2, strict=True),
    "map": lambda: map(str, itertools.count()),
    "call": lambda: iter([1, 2, 3].pop, 1),
    "count": lambda: itertools.count(4, 2),
    "first round": lambda: itertools.cycle(iter([1, 2])),
    "chain": lambda: itertools.chain(iter([1, 2]), [3]),
    "slice": lambda: itertools.islice(itertools.count(), 3, 9, 2),
    "tee": lambda: itertools.tee(twice())[0],
    "product": lambda: itertools.product([1, 2], [3]),
    "method": lambda: itertools.count().__next__,
    "partial": lambda: functools.partial(next, itertools.count()),
    "used up": lambda: iter(()),
}


def all_of(value):
    return [value() for _ in range(2)] if callable(value) else list(itertools.islice(value, 7))


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_gives_again_in_training_what_it_gave_in_a_trial(name):
    given = []
    value = ITERATORS[name]()
    root = trial(Owner(value=value), lambda root: given.extend(all_of(root.value)))
    assert root.value is value
    assert all_of(value) == given == all_of(ITERATORS[name]())


def test_a_generator_cannot_be_used_up_and_that_is_said():
    root = Owner(numbers=twice(), held=[enumerate(twice())], method=twice().send, over=twice())
    list(root.over)
    for step, label in (
        (lambda root: next(root.numbers), "attribute 'numbers' of Owner"),
        (lambda root: list(root.held[0]), "attribute 'held' of Owner"),
        (lambda root: root.method(None), "attribute 'method' of Owner"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"takes items from {label}, a generator made by twice\(\) of test_run_state.py:"
            r".* at .*test_run_state.py:\d+ in .* Python cannot wind that iterator back",
        ):
            trial(root, step)
    trial(root, lambda root: (list(root.over), iter(root.numbers), copy.deepcopy(root.numbers)))
    assert list(root.numbers) == [1, 2]
    assert list(root.held[0]) == [(0, 1), (1, 2)]
    assert root.method(None) == 1


def test_a_refusal_that_the_step_catches_is_raised_at_its_end():
    root = Owner(numbers=twice())

    def step(root):
        with contextlib.suppress(ValueError):
            next(root.numbers)

    with pytest.raises(ValueError, match="Python cannot wind that iterator back"):
        trial(root, step)


def test_files_that_are_read_are_read_again(tmp_path):
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n")
    with path.open() as file, path.open() as running, path.open("a") as written:
        next(running)
        root = Owner(file=file, running=running, written=written, text=io.StringIO("4\n5\n"))
        trial(root, lambda root: (next(root.file), root.text.write("6"), root.written.write("7")))
        assert next(file) == "1\n"
        assert next(root.text) == "4\n"
        with pytest.raises(ValueError, match=r"attribute 'running' of Owner, a _io\.TextIOWrapper"):
            trial(root, lambda root: next(root.running))
        assert next(running) == "2\n"
    assert path.read_text().endswith("3\n7")


NUMBER, TENSOR, HELD = 1, torch.zeros(2), {}


class Counted:
    total = 0
    seen: ClassVar = []


def test_variables_and_classes_of_the_users_files_are_put_back():
    tensor, own = TENSOR, types.ModuleType("own")
    exec("number = 0\ndef add():\n    global number\n    number += 1", own.__dict__)

    def step():
        global NUMBER, TENSOR, NEW
        NUMBER += 1
        TENSOR.add_(1)
        TENSOR = TENSOR + 1
        NEW = 1
        HELD["new"] = 1
        Counted.total += 1
        Counted.new = 1
        Counted.seen.append(1)

    state = RunState(Counted(), device=CPU)
    step()
    assert (NUMBER, NEW, TENSOR.tolist()) == (2, 1, [2, 2])
    state.restore()
    assert (1, tensor, {}) == (NUMBER, TENSOR, HELD)
    assert tensor.tolist() == [0, 0]
    assert "NEW" not in globals()
    assert (Counted.total, Counted.seen, hasattr(Counted, "new")) == (0, [], False)


def test_what_a_trial_imports_and_compiles_stays():
    state = RunState(Counted(), device=CPU)
    globals()["imported"] = types
    state.restore()
    assert globals().pop("imported") is types
    globals()["compiled"] = torch.compile(compiled_later, backend="eager")
    state = RunState(Counted(), device=CPU)
    assert globals()["compiled"](torch.ones(2)).tolist() == [2, 2]
    state.restore()
    assert globals().pop("compiled")(torch.ones(2)).tolist() == [2, 2]


def compiled_later(values):
    torch._dynamo.graph_break()
    return values + len(HELD) + NUMBER


def cached(**options):
    return functools.lru_cache(**options)(lambda number: [number, random.random()])


def test_an_empty_cache_is_empty_again_so_that_it_draws_the_same_numbers():
    root = Owner(cached=cached())
    restored(root, lambda root: root.cached(1))
    assert root.cached.cache_info() == (0, 0, 128, 0)
    first = root.cached(1)
    restored(root, lambda root: root.cached(1).append("changed"))
    assert root.cached(1) is first
    assert len(first) == 2


def test_a_cache_without_a_limit_keeps_what_it_had_and_nothing_else():
    root = Owner(cached=cached(maxsize=None))
    first = root.cached(1)
    restored(root, lambda root: (root.cached(2), root.cached.cache_clear(), root.cached(3)))
    assert root.cached.cache_info().currsize == 1
    assert root.cached(1) is first


def test_a_cache_with_a_limit_that_is_in_use_keeps_what_it_had_and_the_trials_results():
    root = Owner(cached=cached(maxsize=3))
    first = root.cached(1)
    restored(root, lambda root: root.cached(2))
    second = root.cached(2)
    assert root.cached.cache_info()[1:] == (2, 3, 2)
    assert root.cached(1) is first
    assert root.cached(2) is second
    assert [root.cached(number)[0] for number in range(10)] == list(range(10))
    assert root.cached.cache_info().currsize == 3


def test_a_module_of_a_graph_has_its_statistics_again():
    norm = nn.BatchNorm1d(2)
    root = Owner(model=torch.fx.symbolic_trace(nn.Sequential(norm)))
    restored(root, lambda root: root.model(torch.randn(8, 2)))
    assert int(root.model.get_buffer("0.num_batches_tracked")) == 0


def test_what_is_too_large_for_a_copy_is_refused_unless_it_is_data(monkeypatch):
    class Data(Dataset):
        def __init__(self, images):
            self.images = images

    memory = psutil.virtual_memory()
    images = np.zeros(10_000_000)
    monkeypatch.setitem(HELD, "images", images)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=5 * 10**7))
    with pytest.raises(
        ValueError,
        match=r"variable 'HELD' of test_run_state.py holds 76\.29 MiB, .* too little free memory",
    ):
        RunState(Counted(), device=CPU)
    RunState(Owner(data=Data(torch.from_numpy(images))), device=CPU)
    monkeypatch.setitem(globals(), "LOADER", DataLoader(Data(images[1:])))
    RunState(Counted(), device=CPU)
    monkeypatch.delitem(globals(), "LOADER")
    images.flags.writeable = False
    RunState(Counted(), device=CPU)


def test_an_object_that_fails_is_left_alone_and_the_others_are_put_back():
    class Fails:
        def __getattribute__(self, name):
            raise ZeroDivisionError

    class Refuses(list):
        @property
        def __class__(self):
            raise ZeroDivisionError

    root = Owner(one=Fails(), two=Refuses(), count=1)
    restored(root, lambda root: setattr(root, "count", 2))
    assert root.count == 1


def test_a_signal_acts_when_everything_is_put_back():
    class Interrupts(random.Random):
        def setstate(self, state):
            signal.raise_signal(signal.SIGINT)

    root = Owner(before=[1], generator=Interrupts(), after=[1])
    state = RunState(root, device=CPU)
    root.before[0] = root.after[0] = 2
    with pytest.raises(KeyboardInterrupt):
        state.restore()
    assert (root.before, root.after) == ([1], [1])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_of_a_dataset_attributes_and_generators_are_put_back_and_its_data_not_copied():
    class Data(Dataset):
        def __init__(self):
            self.images = torch.zeros(10)
            self.num_read = 0
            self.generator = torch.Generator().manual_seed(1)

        def __getitem__(self, index):
            self.num_read += 1
            return self.images[index] + torch.rand(1, generator=self.generator)

    data = Data()
    first = Data()[3]
    restored(Owner(data=data), lambda root: (root.data[0], root.data.images.fill_(1)))
    assert data.num_read == 0
    assert data.images.tolist() == [1.0] * 10
    assert data[3] == first + 1


def test_what_has_not_changed_is_not_written():
    array = np.arange(4.0)
    array.flags.writeable = False

    class Fixed(dict):
        def __setitem__(self, key, value):
            raise AssertionError("written")

    root = Owner(array=array, fixed=Fixed(a=1))
    restored(root, lambda root: None)
    assert root.fixed == {"a": 1}


def test_putting_back_holds_no_memory_of_the_training_alive():
    import gc
    import weakref

    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    state = RunState(Owner(model=model, optimizer=optimizer), device=CPU)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    kept = [weakref.ref(value) for one in optimizer.state.values() for value in one.values()] + [
        weakref.ref(model.weight.grad)
    ]
    state.restore()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
