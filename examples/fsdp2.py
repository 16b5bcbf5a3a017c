"""A small transformer sharded over several devices by `fully_shard` (FSDP2).

Parameters, gradients and optimizer state are sharded.

    python examples/fsdp2.py     # a process for each GPU, or two on the CPU
    torchrun --nproc-per-node 2 examples/fsdp2.py

First install its packages: `pip install '.[examples]'` in the clone.

Each rank holds its part, and gathers one layer at a time while the layer runs. The report's rows of
parameters, gradients and optimizer state are those of one rank: the whole, divided by the number of
ranks.
"""

from __future__ import annotations

import argparse

import torch
from ddp import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import memcallback as mc

WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH, NUM_WORDS = 256, 4, 4, 128, 1000


def network() -> nn.Sequential:
    """Embedding, encoder layers, and a score for each word."""
    layers = [
        nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(NUM_LAYERS)
    ]
    return nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), *layers, nn.Linear(WIDTH, NUM_WORDS))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """How well the model predicts each next word; words have the shape (batch size, length)."""
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank its part of every layer. A layer on the CPU moves to the device."""
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def run(options: argparse.Namespace, device: torch.device) -> None:
    """What every rank does: predict its part, train, compare.

    Args:
        options: The command line.
        device: That of this rank.
    """
    torch.manual_seed(0)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ranks = mc.Ranks(world_size, shard, rank=rank)
    model = ranks.parallelize(network(), device.type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

    torch.manual_seed(1 + rank)
    words = torch.randint(NUM_WORDS, (options.batch_size, LENGTH + 1), device=device)
    # The prediction needs the whole network: the model above has only the shards of this rank.
    step = mc.TrainingStep(network(), words, loss=loss_of, optimizer=torch.optim.AdamW, ranks=ranks)
    recorder = mc.MemoryRecorder(model, optimizer)
    with mc.MemoryLog(recorder, step, log_every_n_steps=10), recorder.watch(per_module=False):
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss_of(model, words).backward()
            optimizer.step()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small sharded transformer on several devices and record the memory of "
        "each."
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a rank")
    return parser.parse_args()


if __name__ == "__main__":
    launch(run, arguments())
