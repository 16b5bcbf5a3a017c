"""Everything that a training changes is put back, into the same objects."""

import functools
import random
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

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
    state = RunState(device=CPU)
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


def test_a_running_iterator_is_not_turned_back():
    class Stream:
        position = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.position += 1
            return self.position

    root = Owner(stream=Stream())
    restored(root, lambda root: next(root.stream))
    assert next(root.stream) == 2


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
