"""Ranks: the distributed job a step belongs to, and how its model is parallelized."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memcallback.core.tensors import torch_version
from memcallback.core.units import MiB
from memcallback.core.validation import described, whole_number
from memcallback.step.copies.compiled import CompiledAs, has_compiled_code
from memcallback.step.model import layer_containers
from memcallback.step.pipeline import Pipeline, PipelineError, check_options, in_pipeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: We use many private parts of PyTorch's distributed engines; tried with this version and 2.13.
_OLDEST_TORCH = (2, 11)
#: `DistributedDataParallel`'s default, with which its first bucket has 1 MiB.
_DEFAULT_BUCKET_BYTES = 25 * MiB
#: Spreads a model over the devices of a mesh: changes it in place, or returns its replacement.
Parallelize = Callable[..., Any]


class Ranks:
    """A distributed job with one device per rank, and which of its ranks to predict.

    A rank's allocations are traced, not computed by a formula: PyTorch's own code for the strategy
    runs on a model of fake tensors, in a process group of `world_size` ranks that sends nothing.

    - `ddp`: `torch.nn.parallel.DistributedDataParallel`, buckets and communication hooks included.
      It calls a compiled model, or is compiled itself (option `compile`).
    - `fsdp2`: `torch.distributed.fsdp.fully_shard` of each layer of the model's outermost
      containers (`nn.ModuleList`, `nn.Sequential`) and of the whole model. Over a mesh of two
      dimensions this is HSDP: replicas over the first, shards over the second.
    - `tensor_parallel`: `torch.distributed.tensor.parallel.parallelize_module` with a `plan`.
    - `pipeline`: a schedule of `torch.distributed.pipelining` over `n_microbatches`. The step's
      batch is one microbatch, as with accumulation. The step's loss is that of the whole model, and
      every rank has all microbatches on its device.
    - A function `(model, mesh, **options)` that parallelizes the model as your training does. It
      must put the model on the device, and return it if it is a new object. It may return a
      schedule of `torch.distributed.pipelining` instead. Then the step's loss is called with the
      schedule and all microbatches, and must call `schedule.step` as your training does on this
      rank (such as inputs on the first rank, targets on the last).

    A model on a CPU is moved to the device by the strategy, as in a real job. A model on the meta
    device is sharded first, then moved to the device (`to_empty`).

    Args:
        world_size: How many ranks there are, at least 1.
        strategy: How the model is spread over them: one of the names above, or a function.
        rank: Which rank, from 0.
        mesh: Names and sizes of the dimensions of the device mesh; by default `{"dp": world_size}`.
        options: The strategy's options. `ddp`: arguments of `DistributedDataParallel`; `comm_hook`
            and `comm_state` (`register_comm_hook`); `compile`, a function that compiles the
            `DistributedDataParallel`, such as `torch.compile`. `fsdp2`: arguments of
            `fully_shard`. `tensor_parallel`: `plan`. `pipeline`: `n_microbatches`; `schedule`, a
            name for `get_schedule_class` (default `1F1B`); `split`, a function of the model, a
            stage's number from 0 and the number of stages, which returns the stage's module (by
            default an equal share of the children of an `nn.Sequential`); `stages_per_rank`
            (default 1, or 2 if the schedule has several); `return_outputs` and `scale_grads`, as in
            PyTorch's schedules.

    Attributes:
        world_size: How many ranks there are.
        strategy: The strategy's name, or the function.
        rank: Which rank, from 0.
        mesh: Names and sizes of the dimensions of the device mesh.
        options: The strategy's options.

    Raises:
        ValueError: For a number out of range, an unknown strategy, or a mesh whose size is not
            world_size.
        TypeError: For an option that the strategy does not take.
    """

    def __init__(
        self,
        world_size: int,
        strategy: str | Parallelize = "ddp",
        *,
        rank: int = 0,
        mesh: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        self.world_size = whole_number("world_size", world_size, "It is the number of ranks.")
        self.rank = whole_number(
            "rank", rank, f"Ranks are counted from 0 to {world_size - 1}.", least=0
        )
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank must be below world_size, got rank {rank} of {world_size}. Ranks are "
                f"counted from 0 to {world_size - 1}."
            )
        self.mesh = {"dp": self.world_size} if mesh is None else dict(mesh)
        mesh_size = math.prod(
            whole_number(f"mesh[{name!r}]", size, "It is the number of ranks along a dimension.")
            for name, size in self.mesh.items()
        )
        if mesh_size != self.world_size:
            raise ValueError(
                f"mesh {self.mesh} has {mesh_size} places for {world_size} ranks. The product of "
                f"its sizes must be world_size, such as {{'dp': {world_size}}}."
            )
        if not callable(strategy) and strategy not in _STRATEGIES:
            raise ValueError(
                f"strategy must be {', '.join(map(repr, _STRATEGIES))} or a function of the model "
                f"and the device mesh, got {described(strategy)}."
            )
        if strategy == "pipeline" and len(self.mesh) > 1:
            raise ValueError(
                f"mesh {self.mesh} has {len(self.mesh)} dimensions, but strategy 'pipeline' "
                "uses one. Give a function of the model and the mesh that returns the schedule, "
                "and spreads each stage over the other dimensions."
            )
        self.strategy = strategy
        self.options = options
        if not callable(strategy):
            _check_options(strategy, options)

    @property
    def name(self) -> str:
        """The strategy's name."""
        if callable(self.strategy):
            return getattr(self.strategy, "__name__", "a function")
        return self.strategy

    def __repr__(self) -> str:
        """The call that makes it, without defaults."""
        options: dict[str, Any] = {"rank": self.rank} if self.rank else {}
        options |= {"mesh": self.mesh} if self.mesh != {"dp": self.world_size} else {}
        options |= self.options
        strategy = self.name if callable(self.strategy) else repr(self.name)
        arguments = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"Ranks({self.world_size}, {strategy}{arguments})"

    @property
    def compiles_wrapper(self) -> bool:
        """Whether the `DistributedDataParallel` itself is compiled."""
        return self.options.get("compile") is not None

    @property
    def num_updates_to_settle(self) -> int:
        """The number of updates after which each further one allocates the same.

        2 for DistributedDataParallel, which rebuilds its buckets in the second update, and for a
        function, which may do so; else 1.
        """
        return 2 if callable(self.strategy) or self.strategy == "ddp" else 1

    @property
    def num_at_one_batch(self) -> int:
        """How many ranks share a batch: all of them in `tensor_parallel` or `pipeline`, else 1."""
        return self.world_size if self.strategy in ("tensor_parallel", "pipeline") else 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a pipeline; 1 for other strategies, and for a function until traced."""
        return int(self.options["n_microbatches"]) if self.strategy == "pipeline" else 1

    @property
    def unlike(self) -> tuple[int, ...]:
        """The ranks to predict: all of a pipeline; else this one, which represents all."""
        return tuple(range(self.world_size)) if self.strategy == "pipeline" else (self.rank,)

    def as_rank(self, rank: int) -> Ranks:
        """The same job with another rank."""
        other = copy.copy(self)
        other.rank = rank
        return other

    @contextmanager
    def world(self) -> Iterator[None]:
        """Give torch.distributed a process group of this rank that sends nothing."""
        from memcallback.step.fake_world import fake_world

        with fake_world(self.world_size, self.rank):
            yield

    def parallelize(self, model: nn.Module, device_type: str) -> nn.Module:
        """Spread a model over the ranks of the current process group: a real one, or `world`'s.

        Args:
            model: The model, which is changed.
            device_type: `cuda` or `cpu`.

        Returns:
            The model's replacement, with its parameters on the device. For a pipeline it has no
            forward pass; its `step(loss, batch)` runs both passes of all microbatches.

        Raises:
            PipelineError: For a pipeline with a PyTorch that is too old for it. It is a
                `ValueError`, of `memcallback.step.pipeline`.
        """
        if self.strategy == "pipeline" and (needed := newer_torch_needed()):
            raise PipelineError(
                f"A pipeline needs PyTorch {needed} or later, and this is {torch.__version__}. "
                "Install a later one."
            )
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(
            device_type, tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh)
        )
        strategy = self.strategy if callable(self.strategy) else _STRATEGIES[self.strategy]
        changed: Any = strategy(model, mesh, **self.options)
        if changed is None:
            return model
        return changed if isinstance(changed, nn.Module) else Pipeline(changed)


def newer_torch_needed() -> str:
    """The oldest PyTorch that predicts ranks and makes pipelines, if this one is older; else ""."""
    return ".".join(map(str, _OLDEST_TORCH)) if torch_version() < _OLDEST_TORCH else ""


def replicated(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The `DistributedDataParallel` that a model is, or that `torch.compile` has made it of."""
    ddp = getattr(model, "_orig_mod", model)
    return ddp if isinstance(ddp, nn.parallel.DistributedDataParallel) else None


def ranks_of(model: nn.Module, given: Ranks | None = None) -> Ranks | None:
    """The job of a `DistributedDataParallel`, perhaps a compiled one; None for other models.

    Of a job that is given instead, the `DistributedDataParallel` is compiled as this one is.
    """
    wrapped: Any = replicated(model)
    if wrapped is None:
        return given
    compiled: dict[str, Any] = {"compile": CompiledAs(model)} if has_compiled_code(model) else {}
    if given is not None:
        return with_options(given, compiled) if given.strategy == "ddp" else given
    options = {
        name: getattr(wrapped, name)
        for name in (
            "broadcast_buffers",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
        )
    }
    # PyTorch 2.13 keeps the capacity of buckets elsewhere than 2.11.
    capacity_bytes = getattr(wrapped, "_bucket_config", wrapped).bucket_bytes_cap
    if capacity_bytes != _DEFAULT_BUCKET_BYTES:
        options["bucket_cap_mb"] = capacity_bytes / MiB
    for hook, state in wrapped._comm_hooks:
        options |= {"comm_hook": hook, "comm_state": state}
    group = wrapped.process_group
    return Ranks(group.size(), "ddp", rank=group.rank(), **options, **compiled)


def with_options(ranks: Ranks, options: Mapping[str, Any]) -> Ranks:
    """The same job with more options; its own come first."""
    own = {**options, **ranks.options}
    return Ranks(ranks.world_size, ranks.strategy, rank=ranks.rank, mesh=ranks.mesh, **own)


def _check_options(strategy: str, options: Mapping[str, Any]) -> None:
    """Check that a strategy takes its options."""
    from torch.distributed.fsdp import fully_shard

    known = {
        "ddp": {*inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters}
        - {"self", "module", "device_ids", "output_device", "process_group", "device_mesh"}
        | {"comm_hook", "comm_state", "compile"},
        "fsdp2": {*inspect.signature(fully_shard).parameters} - {"module", "mesh"},
        "tensor_parallel": {"plan"},
        "pipeline": {*inspect.signature(in_pipeline).parameters} - {"model", "mesh"},
    }[strategy]
    for name in options:
        if name not in known:
            raise TypeError(
                f"strategy {strategy!r} takes no {name!r}. It takes {', '.join(sorted(known))}."
            )
    if not callable(options.get("compile", torch.compile)):
        raise TypeError(
            "compile must be a function that compiles a module, such as torch.compile, got "
            f"{described(options['compile'])}."
        )
    if strategy == "tensor_parallel" and "plan" not in options:
        raise TypeError(
            "strategy 'tensor_parallel' needs plan=..., what parallelize_module takes as "
            "parallelize_plan."
        )
    if strategy == "pipeline":
        if "n_microbatches" not in options:
            raise TypeError(
                "strategy 'pipeline' needs n_microbatches=..., the number of parts of a batch."
            )
        check_options(**options)


def in_ddp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    comm_hook: Any = None,
    comm_state: Any = None,
    compile: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Wrap a model in `DistributedDataParallel`, on the device of a mesh, and compile that."""
    wrapped = nn.parallel.DistributedDataParallel(model.to(mesh.device_type), **options)
    if comm_hook is not None:
        wrapped.register_comm_hook(comm_state, comm_hook)
    if compile is None:
        return wrapped
    compiled = compile(wrapped)
    if not isinstance(compiled, nn.Module):
        raise TypeError(
            "compile must return the compiled module, such as torch.compile does, got "
            f"{described(compiled)}."
        )
    return compiled


def _fsdp2(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if is_on_meta:
        is_offloaded = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
        model.to_empty(device="cpu" if is_offloaded else mesh.device_type)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers with parameters in the outermost containers: each is gathered separately."""
    try:
        names = layer_containers(model)
    except ValueError:
        return []
    modules = dict(model.named_modules())
    return [
        layer
        for name in names
        for layer in modules[name].children()
        if any(True for _ in layer.parameters())
    ]


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, plan: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(model.to(mesh.device_type), mesh, plan)


_STRATEGIES: dict[str, Parallelize] = {
    "ddp": in_ddp,
    "fsdp2": _fsdp2,
    "tensor_parallel": _tensor_parallel,
    "pipeline": in_pipeline,
}
