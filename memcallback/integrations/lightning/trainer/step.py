"""A Trainer's step as a TrainingStep, with the ranks and the unsharded module of its strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from memcallback.core.errors import reason_of, warn_and_go_on
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.torch_private import FakeTensorMode
from memcallback.step.batch import infer_batch_size, last_batch_size
from memcallback.step.beside import modules_held_by
from memcallback.step.copies.modes import untouched_globals
from memcallback.step.copies.objects import fake_copy
from memcallback.step.lightning_private import checkpoint_fsdp, set_device_mesh
from memcallback.step.model import is_sharded
from memcallback.step.ranks import Ranks, in_ddp, ranks_of
from memcallback.step.trainer_placeholder import facts_of
from memcallback.step.training_step import TrainingStep

#: How to leave the prediction of a Trainer's step out.
LEAVES_OUT_PREDICTION = "MemoryCallback(predict=False)"


@dataclass(frozen=True, kw_only=True)
class UnshardedModule:
    """The module before a strategy has sharded it, so that the step can be traced.

    Attributes:
        module: A copy of the module on fake tensors, not sharded.
        ranks: The job, with the function that shards a module as the strategy does.
    """

    module: Any
    ranks: Ranks


def step_of(
    trainer: Any,
    pl_module: Any,
    batch: object,
    batch_size: int | None,
    unsharded: UnshardedModule | None = None,
    *,
    loaded: Any = None,
) -> TrainingStep:
    """The step that a Trainer is about to run, with the Trainer's settings.

    `loaded` is the batch before the module's hooks have brought it to the device, if it was seen.
    """
    if unsharded is None and is_sharded(trainer.model):
        # The user has sharded it, and this step cannot be predicted.
        return TrainingStep(trainer.model, batch, batch_size=batch_size)
    # Lightning does not clip at 0 or below; its default algorithm is "norm".
    clip = (
        trainer.gradient_clip_val
        if trainer.gradient_clip_val and trainer.gradient_clip_val > 0
        else None
    )
    is_by_value = trainer.gradient_clip_algorithm == "value"
    held = modules_held_by(trainer.callbacks)
    inferred = infer_batch_size(batch).batch_size
    size = inferred if batch_size is None else batch_size
    if loaded is not None and infer_batch_size(loaded).batch_size != inferred:
        # The hooks make other samples, as for two views of each; a step counts those of its model.
        loaded = None
    last = last_batch_size(trainer.train_dataloader, size)
    step = TrainingStep.from_lightning(
        pl_module if unsharded is None else unsharded.module,
        batch if loaded is None else loaded,
        optimizer=trainer.optimizers if unsharded is None else None,
        precision=trainer.precision,
        batch_size=batch_size,
        accumulate=trainer.accumulate_grad_batches,
        clip_grad_norm=None if is_by_value else clip,
        clip_grad_value=clip if is_by_value else None,
        ranks=ranks_within(trainer) if unsharded is None else unsharded.ranks,
        also={
            name: module
            for name, module in held.items()
            if module is not pl_module and module is not trainer.model
        },
        datamodule=trainer.datamodule,
        other_batch_size=last if last is not None and _goes_on_after_an_epoch(trainer) else None,
    )
    assert step.lightning is not None
    step.lightning.facts = facts_of(trainer)
    step.runs_batch_hooks = loaded is not None
    step.moved_batch = None if loaded is None else batch
    return step


def _goes_on_after_an_epoch(trainer: Any) -> bool:
    """Whether a Trainer runs each batch of its loader, and then more."""
    num_batches, epochs = trainer.num_training_batches, trainer.max_epochs
    steps = trainer.max_steps
    try:
        if num_batches < len(trainer.train_dataloader):
            return False
    except Exception as error:  # a loader of the user's can fail in any way
        raise_if_meant(error)
        return False
    num_updates = ceil(num_batches / trainer.accumulate_grad_batches)
    return (epochs in (None, -1) or epochs > 1) and (steps in (None, -1) or steps > num_updates)


def copy_unsharded(trainer: Any, pl_module: Any) -> UnshardedModule | None:
    """Copy a module that is about to be sharded onto fake tensors; None if it is not.

    Also None, with a warning, if it cannot be copied.
    """
    strategy = trainer.strategy
    names = (kind.__name__ for kind in type(strategy).__mro__ if kind.__name__ in _STRATEGIES)
    name = next(names, None)
    if name is None:
        return None
    mesh = getattr(strategy, "device_mesh", None)
    dimensions = (
        dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)) if mesh is not None else None
    )
    try:
        with untouched_globals():
            module = fake_copy(pl_module, FakeTensorMode(allow_non_fake_inputs=True))
    except ENDS as error:  # a user's module can refuse in any way, and training goes on
        raise_if_meant(error)
        warn_and_go_on(
            "The sharded step will not be predicted: the module cannot be copied before it is "
            f"sharded. {reason_of(error)}"
        )
        return None
    return UnshardedModule(
        module=module,
        ranks=Ranks(
            trainer.world_size,
            _STRATEGIES[name](strategy),
            rank=trainer.global_rank,
            mesh=dimensions,
        ),
    )


def ranks_within(trainer: Any) -> Ranks | None:
    """The ranks of a Trainer with DistributedDataParallel; None for another strategy."""
    ranks = ranks_of(trainer.model)
    return None if ranks is None else Ranks(ranks.world_size, ddp, rank=ranks.rank, **ranks.options)


def ddp(model: Any, mesh: Any, **options: Any) -> Any:
    """Wrap a module as `DDPStrategy._setup_model` does."""
    # In a stream of its own, so the first buckets belong to that stream.
    model.to(mesh.device_type)
    with torch.cuda.stream(torch.cuda.Stream()) if mesh.device_type == "cuda" else nullcontext():
        return in_ddp(model, mesh, **options)


def _fsdp(strategy: Any) -> Callable[..., Any]:
    """Wrap a module as `FSDPStrategy._setup_model` does."""
    options = {
        name: value
        for name, value in strategy.kwargs.items()
        if name not in ("process_group", "device_mesh")
    }

    def fsdp(model: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapped = FullyShardedDataParallel(
            module=model,
            cpu_offload=strategy.cpu_offload,
            mixed_precision=strategy.mixed_precision_config,
            sharding_strategy=strategy.sharding_strategy,
            device_id=torch.cuda.current_device() if mesh.device_type == "cuda" else None,
            **options,
        )
        checkpoint_fsdp(strategy, wrapped)
        return wrapped

    return fsdp


def _model_parallel(strategy: Any) -> Callable[..., Any]:
    """Set up a module as `ModelParallelStrategy.setup` does.

    `configure_model` shards it, then the rest is moved to the device.
    """

    def model_parallel(model: Any, mesh: Any) -> None:
        set_device_mesh(model, mesh)
        model.configure_model()
        if any(parameter.is_meta for parameter in model.parameters()):
            model.to_empty(device=mesh.device_type)
        model.to(mesh.device_type)

    return model_parallel


_STRATEGIES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "FSDPStrategy": _fsdp,
    "ModelParallelStrategy": _model_parallel,
}
