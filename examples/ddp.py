"""The digits of `examples/plain_loop.py` on several devices, with DistributedDataParallel.

Each rank records its own memory.

    python examples/ddp.py     # a process for each GPU, or two on the CPU
    torchrun --nproc-per-node 2 examples/ddp.py

First install its packages: `pip install '.[examples]'` in the clone.

Rank zero prints for all: its own report, then the range over the ranks and the rank that is nearest
to its capacity. While it trains, it waits for no other rank. A rank that fails is missing in the
range. A rank that runs out of memory writes its report into a file of its own.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from plain_loop import Batch, data, loss_of, network, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import memcallback as mc

Run = Callable[[argparse.Namespace, torch.device], None]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network on several devices and record the memory of each."
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a rank")
    return parser.parse_args()


def run(options: argparse.Namespace, device: torch.device) -> None:
    """What every rank does: predict, train, compare.

    Args:
        options: The command line.
        device: That of this rank.
    """
    torch.manual_seed(0)
    images, digits = data()[0]
    samples = TensorDataset(images, digits)
    sampler: DistributedSampler[Batch] = DistributedSampler(samples)
    batches = DataLoader(samples, options.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(
        network().to(device), device_ids=[device] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    batch = [tensor.to(device) for tensor in next(iter(batches))]
    # The prediction includes the buckets in which DistributedDataParallel sums gradients. On a CPU
    # they cannot be measured, so the prediction is higher by their size.
    step = mc.TrainingStep(model, batch, loss=loss_of, optimizer=optimizer)
    recorder = mc.MemoryRecorder(model, optimizer)
    with mc.MemoryLog(recorder, step, log_every_n_steps=10), recorder.watch(per_module=False):
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            train(model, optimizer, batches, device)


def launch(run: Run, options: argparse.Namespace) -> None:
    """Run a function on every rank.

    Under torchrun this process is one rank. Otherwise it starts a process for each GPU, or two on
    the CPU if there is no GPU.

    Args:
        run: What every rank does.
        options: The command line.
    """
    if "LOCAL_RANK" in os.environ:
        _join(int(os.environ["LOCAL_RANK"]), run, options)
        return
    num_ranks = torch.cuda.device_count() or 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": str(num_ranks),
        }
    torch.multiprocessing.spawn(_join, (run, options), nprocs=num_ranks)  # type: ignore[attr-defined,no-untyped-call]


def _join(local_rank: int, run: Run, options: argparse.Namespace) -> None:
    """Meet the other ranks, on a GPU of one's own or on the CPU."""
    os.environ.setdefault("RANK", str(local_rank))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    launch(run, arguments())
