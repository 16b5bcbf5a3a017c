"""Compiled code, with CUDA graphs and without, predicted and run on a device."""

import json
import os
from functools import partial

import own_process
import pytest
import torch
from attending import Attending
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


class Scaled(nn.Module):
    """Layers with a Triton kernel between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        from triton_kernels import Scale, launch

        return self.last(nn.functional.gelu(Scale.apply(self.first(x), 0.5, launch)))


with_graphs = partial(torch.compile, mode="reduce-overhead")
MODELS = {
    "whole": lambda: with_graphs(Network()),
    "in parts": InParts,
    "flex attention": lambda: torch.compile(Attending(512)),
    "flex attention, graphs": lambda: with_graphs(Attending(512)),
    "Triton kernel": lambda: torch.compile(Scaled()),
    "Triton kernel, graphs": lambda: with_graphs(Scaled()),
}


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
    # A process that finds the code of flex_attention has 512 bytes more for each constant in it.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "figures.json"
    own_process.start(train, (name, precision, str(file)))
    (ours, theirs), predicted, measured = json.loads(file.read_text())
    base = theirs - ours
    for one, other in zip(predicted[1:], measured[1:], strict=False):
        assert [[label, *(size + base for size in sizes)] for label, *sizes in one] == other


def of_update(_, name, file):
    """In a process of its own: the most that is asked of the allocator in each update."""
    model, most = MODELS[name]().cuda(), []
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss_of(model, torch.ones(1024, 512).cuda()).backward()
        optimizer.step()
        most.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    with open(file, "w") as opened:
        json.dump(most, opened)


def test_a_steady_step_makes_the_same_requests_in_a_process_that_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    of_process = []
    for number in range(2):  # the second finds the code of the first
        file = tmp_path / f"{number}.json"
        own_process.start(of_update, ("whole", str(file)))
        of_process.append(json.loads(file.read_text()))
    cold, warm = of_process
    assert cold[1:] == warm[1:]


class Attention(nn.Module):
    """Attention between two layers."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(384, 1152), nn.Linear(384, 384)

    def forward(self, x):
        parts = self.project(x).unflatten(-1, (3, 6, -1)).transpose(1, 3).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(*parts)
        return self.out(attended.transpose(1, 2).flatten(2))


def peaks(model, batch_sizes):
    """The peaks of updates with so many samples."""
    model.cuda()
    optimizer, measured = torch.optim.AdamW(model.parameters()), []
    for size in batch_sizes:
        torch.cuda.reset_peak_memory_stats()
        on_device = torch.ones(size, 256, 384).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model, on_device)
        loss.backward()
        optimizer.step()
        del loss, on_device
        measured.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    return measured


def fill_cache(_, options, batch_sizes):
    """In a process of its own: compile what the next one finds in Inductor's cache."""
    peaks(torch.compile(Attention(), **options), batch_sizes)


def peaks_with_another_size(_, options, batch_sizes, file):
    """In a process of its own: the updates that are predicted, and their peaks as measured."""
    model = torch.compile(Attention(), **options)
    step = mc.TrainingStep(
        model,
        torch.ones(8, 256, 384),
        loss=loss_of,
        optimizer=torch.optim.AdamW,
        precision="bf16-mixed",
        other_batch_size=5,
    )
    predicted = [
        [each.batch_size, each.peak_allocated_bytes, each.peak_reserved_bytes]
        for each in mc.predict(step, device="cuda").steps
    ]
    measured = [
        [size, *sizes] for size, sizes in zip(batch_sizes, peaks(model, batch_sizes), strict=True)
    ]
    with open(file, "w") as opened:
        json.dump([predicted, measured], opened)


@pytest.mark.parametrize(
    ("options", "batch_sizes"),
    [
        ({}, [8, 8, 5, 8, 8]),
        ({"mode": "reduce-overhead"}, [8, 8, 8, 8, 5, 8, 8, 8, 8, 5, 8, 8, 8, 8]),
    ],
    ids=["default", "graphs"],
)
def test_updates_after_a_smaller_batch_are_predicted(options, batch_sizes, monkeypatch, tmp_path):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "figures.json"
    own_process.start(fill_cache, (options, batch_sizes))
    own_process.start(peaks_with_another_size, (options, batch_sizes, str(file)))
    predicted, measured = json.loads(file.read_text())
    assert predicted == measured
