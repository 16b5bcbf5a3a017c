"""The ways to parallelize a step that `what_if` tries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from memcallback.savings.plan import SavingGroup
from memcallback.savings.saving import Saving
from memcallback.step.ranks import Ranks, with_options
from memcallback.step.training_step import TrainingStep

#: Devices of a machine; HSDP shards within a machine and replicates over machines.
_DEVICES_PER_MACHINE = 8
_OWN_BATCHES = (
    "each rank has a batch of its own, so world_size times as many samples make an update"
)
_ONE_BATCH = "changes nothing: all ranks share one batch"


def usual(step: TrainingStep, batch_size: int, world_size: int) -> Iterator[Ranks]:
    """The usual ways to train on `world_size` ranks."""
    ddp = Ranks(world_size, "ddp", gradient_as_bucket_view=True)
    if step.ranks is not None and step.ranks.compiles_wrapper:
        # What is compiled is DistributedDataParallel, which the others are without.
        yield with_options(ddp, {"compile": step.ranks.options["compile"]})
        return
    yield ddp
    yield Ranks(world_size, "fsdp2")
    yield Ranks(world_size, "fsdp2", reshard_after_forward=False)
    shard = _DEVICES_PER_MACHINE if world_size > _DEVICES_PER_MACHINE else world_size // 2
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
    """A plan for `parallelize_module` from the `tp_plan` of a transformers model.

    None without one, or if PyTorch lacks a style in it.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        # Versions of transformers name these differently.
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    for name, module in model.named_modules():
        plan = getattr(module, "tp_plan", None)
        if isinstance(plan, dict) and plan:
            if not styles.keys() >= {*plan.values()}:
                return None
            prefix = f"{name}." if name else ""
            return {prefix + part: styles[style]() for part, style in plan.items()}
    return None


def over_ranks(jobs: Iterable[Ranks]) -> Iterator[Saving]:
    """The step in each of several jobs."""
    for job in jobs:
        yield Saving(
            name=_name(job),
            kind="ranks",
            group=SavingGroup.CHANGES_NUMBERS
            if job.num_at_one_batch > 1
            else SavingGroup.CHANGES_TRAINING,
            apply=partial(TrainingStep.varied, ranks=job),
            changes=_ONE_BATCH if job.num_at_one_batch > 1 else _OWN_BATCHES,
            line=_line(job),
            num_parts=job.num_microbatches,
        )


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
