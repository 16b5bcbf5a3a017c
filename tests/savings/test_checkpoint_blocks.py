"""`checkpoint` of a list or a dictionary of blocks, and how blocks are called."""

import random

import numpy
import pytest
import torch
from torch import nn

import memcallback as mc


class Scaled(nn.Module):
    """Notes how often it runs; one of its arguments has a name that PyTorch's checkpoint takes."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.num_runs = 0

    def forward(self, hidden, *, debug=1.0):
        self.num_runs += 1
        return torch.sin(self.linear(hidden)) * debug


def test_a_block_gets_the_arguments_it_is_called_with():
    block = Scaled()
    x, debug = torch.ones(4, 8, requires_grad=True), torch.full((4, 8), 2.0, requires_grad=True)
    expected = torch.autograd.grad(block(x, debug=debug).sum(), (x, debug))
    block.num_runs = 0
    with mc.checkpoint(block, ""):
        found = torch.autograd.grad(block(debug=debug, hidden=x).sum(), (x, debug))
    assert block.num_runs == 2
    assert all(map(torch.equal, expected, found))


class Pair(nn.Module):
    """A large part and a small one."""

    def __init__(self):
        super().__init__()
        self.large = nn.Sequential(Scaled(32), Scaled(32), Scaled(32))

    def forward(self, x):
        return self.large(x)


def checkpointed(*containers):
    """The modules of containers that are checkpointed."""
    return {
        id(module)
        for container in containers
        for module in container.modules()
        if "forward" in vars(module)
    }


def ids(modules):
    return {id(module) for module in modules}


@pytest.mark.parametrize(
    "blocks",
    [
        [nn.Linear(8, 8), nn.Linear(8, 8)],
        [Pair()],
        [Pair(), nn.Linear(32, 32)],
        [nn.Sequential(nn.Linear(8, 8), nn.ReLU())],
    ],
    ids=["layers", "one block", "a large and a small one", "a sequential"],
)
def test_each_block_of_a_list_is_checkpointed(blocks):
    for given in (blocks, tuple(blocks), nn.ModuleList(blocks)):
        with mc.checkpoint(given):
            assert checkpointed(*blocks) == ids(blocks)
        assert not checkpointed(*blocks)


def test_each_block_of_a_dictionary_is_checkpointed():
    model = nn.Module()
    model.blocks = nn.ModuleDict({"first": Scaled(), "second": Scaled()})
    with mc.checkpoint(model, "blocks"):
        assert checkpointed(model) == ids(model.blocks.values())
        hidden = model.blocks["first"](torch.ones(4, 8, requires_grad=True))
        model.blocks["second"](hidden).sum().backward()
    assert [block.num_runs for block in model.blocks.values()] == [2, 2]


def test_what_has_no_forward_pass_is_refused():
    model = nn.Module()
    model.stages = nn.ModuleList([Scaled(), nn.ModuleDict({"inner": Scaled()})])
    model.none = nn.ModuleList()
    with pytest.raises(ValueError, match=r"'stages\.1' is a ModuleDict without a forward pass"):
        mc.checkpoint(model, "stages")
    assert not checkpointed(model)
    with pytest.raises(ValueError, match="'none' has no blocks"):
        mc.checkpoint(model, "none")
    with pytest.raises(ValueError, match="'the list' has no blocks"):
        mc.checkpoint([])


class Drawing(nn.Module):
    """Scales by a number that it draws."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, hidden):
        return torch.tanh(self.linear(hidden) * (1 + self.draw()))


@pytest.mark.parametrize(
    ("seed", "draw"),
    [(random.seed, random.random), (numpy.random.seed, numpy.random.rand)],
    ids=["random", "numpy"],
)
def test_numbers_of_python_and_numpy_are_drawn_again_and_the_next_are_as_before(seed, draw):
    torch.manual_seed(0)
    blocks, x = nn.Sequential(*(Drawing(draw) for _ in range(3))), torch.ones(4, 8)

    def trained():
        seed(1)
        loss = blocks(x).sum()
        between = draw()
        return *torch.autograd.grad(loss, list(blocks.parameters())), between, draw()

    expected = trained()
    with mc.checkpoint(list(blocks)):
        found = trained()
    assert all(map(torch.equal, expected[:-2], found[:-2]))
    assert found[-2:] == expected[-2:]
