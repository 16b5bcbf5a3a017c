"""Compiled code with CUDA graphs, predicted and run on a device."""

import json
import os

import pytest
import torch
from device_loop import figures, record_on_device
from torch import nn

import memcallback as mc

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # Dynamo looks whether an activation has a gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="compiles in a child alone"),
]


class Network(nn.Module):
    """A perceptron."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(512, 2048), nn.Linear(2048, 512)
        self.norm = nn.LayerNorm(2048)

    def forward(self, x):
        return self.last(self.norm(nn.functional.gelu(self.first(x))))


class InParts(nn.Module):
    """Compiled layers between others."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Network() for _ in range(2))
        self.between = nn.Linear(512, 512)
        for part in self.parts:
            part.compile(mode="reduce-overhead")

    def forward(self, x):
        return self.parts[1](self.between(self.parts[0](x)))


def loss_of(model, batch):
    return model(batch).float().square().mean()


MODELS = {"whole": lambda: torch.compile(Network(), mode="reduce-overhead"), "in parts": InParts}


def allocated(steps):
    # What is reserved depends on whether the process found its code in Inductor's cache.
    return [[figure[:-1] for figure in figures(step)] for step in steps]


def train(_, name, precision, file):
    """In a process of its own, since a pool of graphs stays: what is predicted and measured."""
    model, batch = MODELS[name](), torch.ones(1024, 512)
    step = mc.TrainingStep(
        model, batch, loss=loss_of, optimizer=torch.optim.AdamW, precision=precision
    )
    predicted = mc.predict(step, device="cuda").steps
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    steps = record_on_device(
        model, batch, loss_of, torch.optim.AdamW, num_steps=5, autocast_dtype=dtype
    )
    starts = [made[0].windows[0].start.allocated_bytes for made in (predicted, steps)]
    with open(file, "w") as opened:
        json.dump([starts, allocated(predicted), allocated(steps)], opened)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_all_updates_are_predicted(name, precision, monkeypatch, tmp_path):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    file = tmp_path / "figures.json"
    torch.multiprocessing.spawn(train, (name, precision, str(file)), nprocs=1)
    (ours, theirs), predicted, measured = json.loads(file.read_text())
    base = theirs - ours
    for one, other in zip(predicted[1:], measured[1:], strict=False):
        assert [[label, *(size + base for size in sizes)] for label, *sizes in one] == other
