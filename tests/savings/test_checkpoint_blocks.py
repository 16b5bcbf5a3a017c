"""`checkpoint` of a list or a dictionary of blocks, and how blocks are called."""

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
