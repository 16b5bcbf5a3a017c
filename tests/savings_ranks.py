"""One of two processes that train with savings under DistributedDataParallel; run by
test_savings_ranks.py.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc

NUM_RANKS, NUM_SAMPLES, MICRO_BATCH, ACCUMULATE = 2, 10, 2, 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def samples(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64), torch.randint(
        0, 4, (NUM_SAMPLES,), generator=generator
    )


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accumulated(rank, *, has_length):
    """The gradients of each update, and how often the ranks exchanged them."""
    model, exchanges, seen = DistributedDataParallel(network()), [], []
    model.register_comm_hook(
        None,
        lambda state, bucket: (exchanges.append(bucket.index()), allreduce_hook(state, bucket))[1],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(
        lambda *_: seen.append([parameter.grad.clone() for parameter in model.parameters()])
    )
    loader = DataLoader(TensorDataset(*samples(rank)), MICRO_BATCH)
    accumulation = mc.accumulate(ACCUMULATE, model, optimizer)
    for batch in accumulation.over(loader if has_length else (batch for batch in loader)):
        accumulation.backward(loss_of(model, batch))
        accumulation.step()
    return {"gradients": seen, "num_exchanges": len(exchanges)}


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def checkpointed(rank, *, is_checkpointed):
    """What three steps under mixed precision leave, the second of them skipped."""
    torch.manual_seed(0)
    module = Normalised()
    model = DistributedDataParallel(copy.deepcopy(module))
    if is_checkpointed:
        assert mc.checkpoint(model).names == ("blocks",)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mc.amp("16-mixed", device="cpu", init_scale=256.0, say=lambda text: None)
    accumulation = mc.accumulate(2, model, optimizer, amp=amp)
    torch.manual_seed(100 + rank)
    updates = []
    for position, batch in enumerate(accumulation.over([torch.randn(4, 8) for _ in range(6)])):
        with amp.autocast():
            loss = model(batch).square().mean()
        # One rank overflows, and both skip.
        accumulation.backward(loss * float("inf") if (rank, position) == (1, 2) else loss)
        updates.append(accumulation.step(clip_grad_norm=1.0))
    gradients = [parameter.grad for parameter in model.parameters()]
    return {
        "state": model.module.state_dict(),
        "gradients": gradients,
        "updates": updates,
        "generator": torch.get_rng_state(),
    }


def refusal():
    model = network()
    accumulation = mc.accumulate(2, model, torch.optim.SGD(model.parameters()))
    try:
        next(accumulation.over([torch.ones(2, 8)], num_samples=len))
    except ValueError as error:
        return str(error)


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS
    )
    found = {
        "with length": accumulated(rank, has_length=True),
        "without length": accumulated(rank, has_length=False),
        "plain": checkpointed(rank, is_checkpointed=False),
        "checkpointed": checkpointed(rank, is_checkpointed=True),
        "refusal": refusal(),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
