"""Hooks of a copied model: they work on the copy, and leave nothing of it behind."""

import copy
import functools
from types import FunctionType

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import memcallback as mc
from memcallback.step.copies.functions import untouched_variables
from memcallback.step.copies.objects import fake_copy
from memcallback.step.copies.resizing import resize_batch


@pytest.fixture
def mode():
    return FakeTensorMode()


def ran(model, mode):
    """A copy of a model after a forward and a backward pass."""
    made = fake_copy(model, mode)
    with mode:
        made(torch.zeros(2, 3)).sum().backward()
    return made


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.kept = []
        self.body.register_forward_hook(lambda module, args, output: self.kept.append(output))
        self.body.weight.register_hook(lambda gradient: self.kept.append(gradient))

    def forward(self, x):
        return self.body(x)


def test_a_hook_that_knows_its_module_by_a_closure_works_on_the_copy(mode):
    model = Keeps()
    made = ran(model, mode)
    assert model.kept == []
    assert [tuple(tensor.shape) for tensor in made.kept] == [(2, 4), (4, 3)]


def test_a_copy_leaves_pythons_own_copies_as_they_were(mode):
    model = Keeps()
    names = [name for name in vars(copy) if name.startswith("_") and name != "__builtins__"]
    before = {name: copy.copy(getattr(copy, name)) for name in names}
    fake_copy(model, mode)
    assert {name: getattr(copy, name) for name in names} == before
    assert copy.deepcopy({"function": ran})["function"] is ran


def test_an_optimizer_that_hooks_of_parameters_step_is_copied_with_its_parameters(mode):
    model = nn.Linear(3, 4)
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    made = ran(model, mode)
    assert all(parameter.grad is None for parameter in made.parameters())
    assert not any(optimizer.state for optimizer in optimizers.values())


def test_a_hook_that_knows_its_module_by_a_global_variable_or_a_default_works_on_the_copy(mode):
    model, seen = nn.Linear(3, 4), []
    names = {"model": model, "seen": seen}
    exec("def helper():\n    seen.append(model.weight)\ndef hook(*_):\n    helper()", names)
    assert isinstance(names["hook"], FunctionType)
    model.register_forward_hook(names["hook"])
    model.register_forward_hook(functools.partial(lambda owner, *_: seen.append(owner.bias), model))
    model.register_forward_hook(lambda *_, owner=model: seen.append(owner.bias))
    made = ran(model, mode)
    weight, *biases = seen
    assert weight is made.weight
    assert biases[0] is biases[1] is made.bias


def test_two_hooks_share_the_variables_that_they_write(mode):
    model, last = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), None
    seen = []

    def first(module, args, output):
        nonlocal last
        last = model[0] if module is model[0] else None

    model[0].register_forward_hook(first)
    model[1].register_forward_pre_hook(lambda module, args: seen.append(last))
    made = ran(model, mode)
    assert seen == [made[0]]


def test_other_functions_are_shared(mode):
    def run(x):
        return x

    model = nn.Linear(3, 4)
    model.run = run
    assert fake_copy(model, mode).run is run


def test_what_hooks_and_losses_write_to_is_as_it_was(mode):
    model, kept, last, counts = nn.Linear(3, 4), ["before"], None, {"calls": 1}

    def hook(module, args, output):
        nonlocal last
        last = output
        kept.append(output)

    def loss(model, batch):
        counts["calls"] += 1

    model.register_forward_hook(hook)
    with untouched_variables(model, [loss]):
        ran(model, mode)
        loss(None, None)
        assert isinstance(last, FakeTensor)
        assert len(kept) == counts["calls"] == 2
    assert (kept, last, counts) == (["before"], None, {"calls": 1})


def test_a_batch_with_functions_is_resized(mode):
    batch = fake_copy({"x": torch.zeros(4, 3), "collate": lambda: None}, mode)
    assert resize_batch(batch, 4, 6)["x"].shape == (6, 3)


class Remembers:
    """A loss whose containers are one of them twice, and one that holds itself."""

    def __init__(self, model):
        self.model = model
        self.first = self.second = []
        self.tree = {"parent": None, "rows": self.first}
        self.tree["parent"] = self.tree

    def loss(self, model, batch):
        assert self.first is self.second is self.tree["rows"]
        assert self.tree is self.tree["parent"]
        self.first.append(len(self.second))
        self.tree["last"] = len(self.first)
        return self.model(batch).sum()


def test_containers_that_a_loss_has_twice_or_that_hold_themselves_are_so_in_its_copy():
    model = nn.Linear(3, 4)
    loss = Remembers(model)
    step = mc.TrainingStep(model, torch.zeros(2, 3), loss=loss.loss)
    mc.predict(step, device="H100", isolate=False)
    assert loss.first == []
    assert "last" not in loss.tree
