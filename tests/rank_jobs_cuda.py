"""One rank of a job on CUDA devices that reads the allocator's statistics itself, beside a log; run
by test_ranks_cuda.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memcallback as mc

NUM_STEPS = 4


def _network():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)))


def _replicated(own):
    return DistributedDataParallel(own)


def _sharded(own):
    for layer in own:
        fully_shard(layer)
    return fully_shard(own)


STRATEGIES = {"ddp": _replicated, "fully_shard": _sharded}


def run(rank, num_ranks, port, folder, strategy):
    """What the allocator's statistics said in the last step, and the log's report."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )
    seen, reset = [], torch.cuda.reset_peak_memory_stats

    def read_and_reset(device=None):
        statistics = torch.cuda.memory_stats(rank)
        seen.append((statistics["allocated_bytes.all.peak"], statistics["reserved_bytes.all.peak"]))
        reset(device)

    torch.cuda.reset_peak_memory_stats = read_and_reset
    model = STRATEGIES[strategy](_network().cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = mc.MemoryRecorder(model, optimizer)
    batch = torch.zeros(64 * (1 + rank), 1024, device="cuda")
    with (
        mc.MemoryLog(recorder, log_dir=None, log_every_n_steps=1) as log,
        recorder.watch(per_module=False),
    ):
        for _ in range(NUM_STEPS):
            before = len(seen)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # What was read first in a step was before it.
            own = seen[before + 1 :]
    capacity_bytes = torch.cuda.get_device_properties(rank).total_memory
    found = {
        "peak_allocated_bytes": max(allocated for allocated, _ in own),
        "peak_reserved_bytes": max(reserved for _, reserved in own),
        "capacity_bytes": capacity_bytes,
        "report": log.report,
    }
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
