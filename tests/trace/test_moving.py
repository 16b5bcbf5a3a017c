"""A model that is not on the device yet: what `nn.Module.to` allocates there."""

import pytest
import torch
from torch import nn

import memcallback as mc

#: Bytes on the device after `.to`, as PyTorch 2.11 took on a virtual device.
PARAMETER_BYTES = {"rows": 8192, "columns": 4096, "one": 3600, "other": 3600, "tied": 10000}
BUFFER_BYTES = {
    "rows": 16384,
    "next_rows": 16384,
    "transposed": 1048576,
    "columns": 4096,
    "expanded": 1048576,
    "mask": 3 * 40000,
}


class Block(nn.Module):
    def __init__(self, weight, mask):
        super().__init__()
        self.weight = weight
        self.register_buffer("mask", mask)

    def forward(self, x):
        return (x @ self.weight).sum() + self.mask.sum()


class Views(nn.Module):
    """Parameters and buffers that are parts of larger tensors, or the same tensor."""

    def __init__(self, device):
        super().__init__()
        with torch.device(device):
            many = torch.zeros(1024, 1024)
            self.register_buffer("rows", many[:4])
            self.register_buffer("next_rows", many[4:8])
            self.register_buffer("transposed", torch.zeros(256, 1024).t())
            self.register_buffer("columns", torch.zeros(256, 1024)[:, :4])
            self.register_buffer("expanded", torch.zeros(256, 1).expand(256, 1024))
            self.parameter_rows = nn.Parameter(torch.zeros(512, 1024)[:2])
            self.parameter_columns = nn.Parameter(torch.zeros(512, 1024)[:, :2])
            base = torch.zeros(30, 30)
            self.one, self.other = nn.Parameter(base), nn.Parameter(base)
            tied, mask = nn.Parameter(torch.zeros(50, 50)), torch.zeros(100, 100)
            self.blocks = nn.ModuleList(Block(tied, mask) for _ in range(3))

    def forward(self, x):
        held = sum(tensor.sum() for tensor in (*self.buffers(), *self.parameters()))
        return held + sum(block(x) for block in self.blocks)


def at_start(model, device):
    step = mc.TrainingStep(model, torch.zeros(2, 50), optimizer=torch.optim.SGD)
    prediction = mc.predict(step, device=device, progress=lambda done, num_all: None)
    return prediction.step.phases[mc.Phase.FORWARD].start.by_category


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_tensor_of_a_model_gets_a_storage_of_its_own_as_it_moves(device):
    held = at_start(Views(device), "A100")
    assert held[mc.Category.PARAMETER] == sum(PARAMETER_BYTES.values())
    assert held[mc.Category.BUFFER] == sum(BUFFER_BYTES.values())


def test_a_model_that_does_not_move_keeps_its_storages():
    held = at_start(Views("cpu"), "cpu")
    assert held[mc.Category.PARAMETER] == 2 * 512 * 1024 * 4 + 3600 + 10000
    assert held[mc.Category.BUFFER] == 4 * (1024 * 1024 + 2 * 256 * 1024 + 256 + 100 * 100)


@pytest.mark.cuda
def test_a_model_takes_on_a_device_what_is_predicted_of_it():
    torch.zeros(1, device="cuda")
    model, held = Views("cpu"), at_start(Views("cpu"), torch.cuda.get_device_name())
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model.to("cuda")
    moved_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    assert moved_bytes == held[mc.Category.PARAMETER] + held[mc.Category.BUFFER]
