"""Trains a small network with savings in a plain loop and records it; run by test_savings.py on a
CPU and by test_savings_cuda.py on a GPU.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import nn

import memcallback as mc

BATCH_SIZE, WIDTH = 256, 128
#: What is tried: each saving alone, and all together.
SAVINGS = [
    {"accumulate": 4},
    {"amp": "bf16-mixed"},
    {"amp": "16-mixed"},
    {"checkpoint": True},
    {"accumulate": 2, "amp": "bf16-mixed", "checkpoint": {"blocks": 2}},
    {"accumulate": 4, "amp": "16-mixed", "checkpoint": "blocks"},
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.dropout(self.perceptron(self.norm(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.head(self.blocks(x))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(size, device):
    return torch.randn(size, WIDTH, device=device), torch.randint(0, 10, (size,), device=device)


def training_step(device):
    """The step without savings."""
    return mc.TrainingStep(
        Network().to(device), batch_of(BATCH_SIZE, device), loss=loss_of, optimizer=torch.optim.Adam
    )


def predicted(step, device=None, *, accumulate=None, amp=None, checkpoint=None):
    """A step with savings, as many samples between two updates as without."""
    changes = {} if amp is None else {"precision": amp}
    if accumulate is not None:
        is_plain_loop = step.lightning is None
        changes |= {"accumulate": accumulate, "has_accumulation": is_plain_loop}
    names = None if checkpoint is True else checkpoint
    with mc.checkpoint(step.model, names) if checkpoint else nullcontext():
        batch_size = math.ceil(step.batch_size.batch_size / (accumulate or 1))
        return mc.predict(step.varied(**changes), device=device, batch_size=batch_size)


def measured(device, *, accumulate=1, amp=None, checkpoint=None):
    """The steady steps of the second update and the last micro-batch of it."""
    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    if checkpoint:
        mc.checkpoint(model, None if checkpoint is True else checkpoint)
    mixed = mc.amp(amp, device=device, say=lambda text: None) if amp else None
    accumulation = mc.accumulate(accumulate, model, optimizer, amp=mixed)
    recorder = mc.MemoryRecorder(model, optimizer)

    def micro_batches():
        for _ in range(3 * accumulate):
            yield batch_of(BATCH_SIZE // accumulate, "cpu")

    for on_host in accumulation.over(micro_batches()):
        batch = tuple(tensor.to(device) for tensor in on_host)
        with recorder.step(batch):
            with recorder.phase(mc.Phase.FORWARD), mixed.autocast() if mixed else nullcontext():
                loss = loss_of(model, batch)
            with recorder.phase(mc.Phase.BACKWARD):
                accumulation.backward(loss)
            with recorder.phase(mc.Phase.OPTIMIZER_STEP):
                accumulation.step()
        del loss, batch, on_host
    recorder.close()
    return recorder.steps[-1]
