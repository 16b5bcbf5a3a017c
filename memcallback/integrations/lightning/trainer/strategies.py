"""Ranks from a Lightning strategy; the unsharded module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcallback.core.errors import reason_of, warn_and_go_on
from memcallback.step.copies.fakes import fake_copy, untouched_globals
from memcallback.step.ranks import Ranks, in_ddp, ranks_of


@dataclass(frozen=True, kw_only=True)
class UnshardedModule:
    """What can be traced where a strategy leaves a rank nothing but shards.

    Attributes:
        module: A copy of the module on fake tensors, not sharded.
        ranks: The job, with what the strategy does to a module.
    """

    module: Any
    ranks: Ranks


def whole_before(trainer: Any, pl_module: Any) -> UnshardedModule | None:
    """Take a copy without data of a module that is about to be sharded; None where the strategy
    does not do that, or, with a warning, if it cannot be copied.
    """
    strategy = trainer.strategy
    spread = next(
        (
            _STRATEGIES[kind.__name__]
            for kind in type(strategy).__mro__
            if kind.__name__ in _STRATEGIES
        ),
        None,
    )
    if spread is None:
        return None
    mesh = getattr(strategy, "device_mesh", None)
    dimensions = (
        dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)) if mesh is not None else None
    )
    try:
        with untouched_globals():
            module = fake_copy(pl_module, FakeTensorMode(allow_non_fake_inputs=True))
    except Exception as error:  # a user's module can refuse in any way, and training goes on
        warn_and_go_on(
            f"The sharded step will not be predicted: the module cannot be copied before it is sharded. {reason_of(error)}"
        )
        return None
    return UnshardedModule(
        module=module,
        ranks=Ranks(
            trainer.world_size, spread(strategy), rank=trainer.global_rank, mesh=dimensions
        ),
    )


def ranks_within(trainer: Any) -> Ranks | None:
    """The job that a Trainer with `strategy="ddp"` trains in; None for a strategy that does not
    wrap its module in DistributedDataParallel.
    """
    found = ranks_of(trainer.model)
    return None if found is None else Ranks(found.world_size, ddp, rank=found.rank, **found.options)


def ddp(model: Any, mesh: Any, **options: Any) -> Any:
    """As `DDPStrategy._setup_model` wraps a module: in a stream of its own, where the first buckets
    therefore are.
    """
    model.to(mesh.device_type)
    with torch.cuda.stream(torch.cuda.Stream()) if mesh.device_type == "cuda" else nullcontext():
        return in_ddp(model, mesh, **options)


def _fsdp(strategy: Any) -> Callable[..., Any]:
    """As `FSDPStrategy._setup_model` wraps a module."""
    options = {
        name: value
        for name, value in strategy.kwargs.items()
        if name not in ("process_group", "device_mesh")
    }
    helpers = import_module(
        next(kind.__module__ for kind in type(strategy).__mro__ if kind.__name__ == "FSDPStrategy")
    )

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
        helpers._setup_activation_checkpointing(wrapped, strategy._activation_checkpointing_kwargs)
        return wrapped

    return fsdp


def _model_parallel(strategy: Any) -> Callable[..., Any]:
    """As `ModelParallelStrategy.setup` does: `configure_model` spreads the module, what is left
    goes to the device.
    """

    def model_parallel(model: Any, mesh: Any) -> None:
        model._device_mesh = mesh
        model.configure_model()
        if any(parameter.is_meta for parameter in model.parameters()):
            model.to_empty(device=mesh.device_type)
        model.to(mesh.device_type)

    return model_parallel


_STRATEGIES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "FSDPStrategy": _fsdp,
    "ModelParallelStrategy": _model_parallel,
}
