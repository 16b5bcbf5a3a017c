"""The ways to parallelize that are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from memcallback.savings.candidates import Saving
from memcallback.step.ranks import Ranks
from memcallback.step.training_step import TrainingStep

#: Devices of one machine, over which HSDP shards where there are several such machines.
_NUM_TOGETHER = 8
_CHANGES = (
    "each rank has a batch of its own, so there are as many times more samples between two updates"
)
_TOGETHER = "nothing: the ranks are at one batch together"


def usual(step: TrainingStep, batch_size: int, world_size: int) -> Iterator[Ranks]:
    """The usual ways to train on so many ranks."""
    yield Ranks(world_size, "ddp", gradient_as_bucket_view=True)
    yield Ranks(world_size, "fsdp2")
    yield Ranks(world_size, "fsdp2", reshard_after_forward=False)
    shard = _NUM_TOGETHER if world_size > _NUM_TOGETHER else world_size // 2
    if shard > 1 and world_size % shard == 0:
        yield Ranks(world_size, "fsdp2", mesh={"replicate": world_size // shard, "shard": shard})
    plan = tensor_parallel_plan(step.model)
    if plan is not None:
        yield Ranks(world_size, "tensor_parallel", plan=plan)
    if (
        isinstance(step.model, nn.Sequential)
        and len(step.model) >= world_size
        and batch_size % world_size == 0
    ):
        yield Ranks(world_size, "pipeline", n_microbatches=world_size)


def tensor_parallel_plan(model: nn.Module) -> dict[str, Any] | None:
    """A plan for `parallelize_module` from what a model of transformers says of itself (`tp_plan`);
    None if it says nothing, or what PyTorch has no style for.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        # The same under the names of several versions.
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    for name, module in model.named_modules():
        told = getattr(module, "tp_plan", None)
        if isinstance(told, dict) and told:
            prefix = f"{name}." if name else ""
            return (
                {prefix + part: styles[style]() for part, style in told.items()}
                if styles.keys() >= {*told.values()}
                else None
            )
    return None


def over_ranks(jobs: Iterable[Ranks]) -> Iterator[Saving]:
    """A step in each of several jobs."""
    for job in jobs:
        yield Saving(
            name=_name(job),
            kind="ranks",
            apply=partial(_within, job),
            changes=_TOGETHER if job.num_at_one_batch > 1 else _CHANGES,
            line=_line(job),
            num_parts=job.num_microbatches,
        )


def _within(job: Ranks, step: TrainingStep) -> TrainingStep:
    return step.varied(ranks=job)


def _line(job: Ranks) -> str:
    if job.strategy == "tensor_parallel":
        return "torch.distributed.tensor.parallel.parallelize_module(model, mesh, plan)"
    return f"memcallback.{job!r}.parallelize(model, 'cuda')"


def _name(job: Ranks) -> str:
    options = ", ".join(
        f"{name}={value}"
        for name, value in job.options.items()
        if isinstance(value, (bool, int, float, str))
    )
    sizes = " x ".join(map(str, job.mesh.values()))
    return f"{job.name} on {sizes}" + (f", {options}" if options else "")
