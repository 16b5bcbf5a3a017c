"""How a model can be spread over several ranks: what can be tried on a step, each a change of the `TrainingStep`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from memcallback.ranks import Ranks
from memcallback.steps import TrainingStep
from memcallback.variants import Saving

#: Devices of one machine, over which HSDP shards where there are several such machines.
_NUM_TOGETHER = 8
_CHANGES = "each rank has a batch of its own, so there are as many times more samples between two updates"


def usual(world_size: int) -> Iterator[Ranks]:
    """The usual ways to train on so many ranks: DDP, FSDP2 with and without layers that are gathered twice, HSDP.

    Args:
        world_size: How many, at least 2.
    """
    yield Ranks(world_size, "ddp", gradient_as_bucket_view=True)
    yield Ranks(world_size, "fsdp2")
    yield Ranks(world_size, "fsdp2", reshard_after_forward=False)
    shard = _NUM_TOGETHER if world_size > _NUM_TOGETHER else world_size // 2
    if shard > 1 and world_size % shard == 0:
        yield Ranks(world_size, "fsdp2", mesh={"replicate": world_size // shard, "shard": shard})


def over_ranks(jobs: Sequence[Ranks]) -> Iterator[Saving]:
    """A step in each of several jobs.

    Args:
        jobs: The jobs.
    """
    for job in jobs:
        yield Saving(
            name=_name(job),
            kind="ranks",
            apply=partial(_within, job),
            changes=_CHANGES,
            line=f"memcallback.{job!r}.parallelize(model, 'cuda')",
        )


def _within(job: Ranks, step: TrainingStep) -> TrainingStep:
    return step.varied(ranks=job)


def _name(job: Ranks) -> str:
    options = ", ".join(f"{name}={value}" for name, value in job.options.items() if isinstance(value, (bool, int, float, str)))
    sizes = " x ".join(map(str, job.mesh.values()))
    return f"{job.name} on {sizes}" + (f", {options}" if options else "")
