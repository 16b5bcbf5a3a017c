"""Compiled code with CUDA graphs, predicted and run on a device."""

import os

import pytest
import torch
from device_loop import empty_device, figures, record_on_device
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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "make", [lambda: torch.compile(Network(), mode="reduce-overhead"), InParts], ids=["whole", "in"]
)
def test_all_updates_are_predicted(make, precision, monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    torch._dynamo.reset()
    model, batch = make(), torch.ones(1024, 512)
    step = mc.TrainingStep(
        model, batch, loss=loss_of, optimizer=torch.optim.AdamW, precision=precision
    )
    predicted = mc.predict(step, device="cuda")
    empty_device()
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    steps = record_on_device(
        model, batch, loss_of, torch.optim.AdamW, num_steps=5, autocast_dtype=dtype
    )

    def allocated(step):
        # What is reserved depends on whether the process found its code in Inductor's cache.
        return [figure[:-1] for figure in figures(step)]

    base = steps[0].windows[0].start.allocated_bytes - (
        predicted.steps[0].windows[0].start.allocated_bytes
    )
    for ours, theirs in zip(predicted.steps[1:], steps[1:], strict=False):
        shifted = [(label, *(size + base for size in sizes)) for label, *sizes in allocated(ours)]
        assert shifted == allocated(theirs)
