"""Finds out who owns memory that grows: the live storages of each owner, compared over time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType

import torch

from memcallback.core.code_lines import is_library
from memcallback.core.interruptions import PassOver
from memcallback.core.torch_private import DisableTorchFunctionSubclass, storage_id
from memcallback.core.types import Category
from memcallback.diagnose.tensors.live import alive_objects, grad_fn_of, live_storages
from memcallback.diagnose.tensors.saved import graph_nodes
from memcallback.diagnose.tensors.variables import (
    Scope,
    is_of_memcallback,
    module_attributes,
    scope_tensors,
    scopes,
    stack,
)
from memcallback.prediction.allocator.settings import AllocatorSettings

#: Graphs are measured for at most so many owners.
_MAX_GRAPHS = 50


@dataclass
class OwnerStorages:
    """The live storages of one owner.

    Attributes:
        owner: As in `LiveTensor.owner`; empty if unknown.
        count: Number of storages.
        num_bytes: Their size; on an accelerator rounded as its allocator rounds.
        kinds: How many there are of each shape and dtype.
        keeps_graph: Whether one was computed with gradients, or saved for a backward pass.
    """

    owner: str
    count: int = 0
    num_bytes: int = 0
    kinds: Counter[tuple[tuple[int, ...], str]] = field(default_factory=Counter)
    keeps_graph: bool = False

    def add(self, num_bytes: int, kind: tuple[tuple[int, ...], str], keeps_graph: bool) -> None:
        """Count one more storage."""
        self.count += 1
        self.num_bytes += num_bytes
        self.kinds[kind] += 1
        self.keeps_graph |= keeps_graph

    @property
    def most_frequent_kind(self) -> str:
        """Shape and dtype of most of the storages, such as `(8, 10) float32`."""
        ((shape, dtype), _), *_ = self.kinds.most_common(1)
        return f"{shape} {dtype}"


@dataclass(frozen=True, kw_only=True)
class LiveByOwner:
    """Everything alive on a device after a step, except the batch. It holds no tensor.

    Attributes:
        step: The step.
        by_owner: The storages of each owner.
        graph_sizes: Autograd nodes behind the tensor of each variable and attribute; if it has
            several tensors, behind the last.
    """

    step: int
    by_owner: dict[str, OwnerStorages]
    graph_sizes: dict[str, int]

    @property
    def owned_bytes(self) -> int:
        """Bytes of storages with a known owner. The rest may be garbage not yet collected."""
        return sum(storages.num_bytes for storages in self._owned())

    @property
    def num_owned(self) -> int:
        """Number of storages with a known owner."""
        return sum(storages.count for storages in self._owned())

    def _owned(self) -> Iterator[OwnerStorages]:
        for owner, storages in self.by_owner.items():
            if owner != "" and not owner.startswith("output of "):
                yield storages


@dataclass(frozen=True, kw_only=True)
class OwnerGrowth:
    """How much an owner has grown.

    Attributes:
        now: The storages it has now.
        count: Additional storages; 0 if the same ones became larger.
        num_bytes: Additional bytes, above 0.
    """

    now: OwnerStorages
    count: int
    num_bytes: int


def program_frames() -> list[FrameType]:
    """The stack without our own frames: the user's frames first, so that they name the owners."""
    # A frame of ours would hold this list, and the list the frame: a cycle that keeps the batch
    # alive until Python collects it.
    frames = [
        frame
        for frame in stack(sys._getframe(1))
        if not is_of_memcallback(frame.f_code.co_filename)
    ]
    return sorted(frames, key=lambda frame: is_library(frame.f_code.co_filename))


def live_by_owner(
    step: int,
    modules: Sequence[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    batch: object,
    device: torch.device,
    frames: Sequence[FrameType],
) -> LiveByOwner:
    """Group the live storages of a device by owner, without allocating or keeping any alive."""
    tensors = alive_objects(torch.Tensor)
    in_globals = list(_global_tensors())
    owner_in_globals = _owner_of_storages(in_globals)
    computed = _computed_storages(tensors)
    settings = AllocatorSettings()
    by_owner: dict[str, OwnerStorages] = {}
    for live, reference in live_storages(
        modules, optimizers, batch, device, frames=frames, others=tensors
    ):
        storage = reference()
        if storage is None or live.category is Category.INPUT:
            continue
        owner = live.owner
        if not is_variable(owner):
            owner = owner_in_globals.get(storage_id(storage), owner)
        by_owner.setdefault(owner, OwnerStorages(owner)).add(
            live.size_bytes if device.type == "cpu" else settings.block_bytes(live.size_bytes),
            (live.shape, live.dtype),
            live.category is Category.ACTIVATION or storage_id(storage) in computed,
        )
    return LiveByOwner(
        step=step, by_owner=by_owner, graph_sizes=_graph_sizes(modules, frames, in_globals)
    )


def is_variable(owner: str) -> bool:
    """Whether an owner is a variable or an attribute of the user's program."""
    return "'" in owner and not owner.startswith("attribute 'saved") and "Backward" not in owner


def growing_owners(series: Sequence[LiveByOwner]) -> list[OwnerGrowth]:
    """The owners whose bytes rise, and whose count never falls, over a series; largest first."""
    growing = []
    for owner, now in series[-1].by_owner.items():
        storages = [live.by_owner.get(owner) or OwnerStorages(owner) for live in series]
        if all(
            after.num_bytes > before.num_bytes and after.count >= before.count
            for before, after in pairwise(storages)
        ):
            first = storages[0]
            growing.append(
                OwnerGrowth(
                    now=now,
                    count=now.count - first.count,
                    num_bytes=now.num_bytes - first.num_bytes,
                )
            )
    return sorted(growing, key=lambda growth: (growth.num_bytes, growth.count), reverse=True)


def growing_graph(series: Sequence[LiveByOwner]) -> str:
    """The owner of the largest graph among those that grow over a series; empty for none."""
    last = series[-1].graph_sizes
    growing = [
        owner
        for owner in last
        if all(
            after.graph_sizes[owner] > before.graph_sizes.get(owner, after.graph_sizes[owner])
            for before, after in pairwise(series)
            if owner in after.graph_sizes
        )
    ]
    return max(growing, key=lambda owner: last[owner], default="")


def _computed_storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The identities of storages that autograd computed."""
    computed = set()
    with DisableTorchFunctionSubclass():
        for tensor in tensors:
            with PassOver():  # a tensor of a user's class without a storage
                if grad_fn_of(tensor) is not None:
                    computed.add(storage_id(tensor.untyped_storage()))
    return computed


def _graph_sizes(
    modules: Iterable[torch.nn.Module],
    frames: Iterable[FrameType],
    in_globals: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, int]:
    """Count the autograd nodes behind the tensors of variables and attributes."""
    in_modules = (
        ((owner, tensor) for _, owner, tensor in module_attributes(model)) for model in modules
    )
    tensors: dict[str, torch.Tensor] = {}
    for owned in (*in_modules, *map(scope_tensors, scopes(frames)), in_globals):
        with PassOver():  # user code may run when its tensors are read
            tensors.update((owner, tensor) for owner, tensor in owned if tensor.requires_grad)
    sizes = {}
    for owner, tensor in list(tensors.items())[:_MAX_GRAPHS]:
        with PassOver(), DisableTorchFunctionSubclass():  # a node of an extension
            if (node := grad_fn_of(tensor)) is not None:
                sizes[owner] = len(graph_nodes([node]))
    return sizes


def _global_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in global variables of the user's files, with their owners."""
    with PassOver():  # a user's module may change while it is read
        yield from scope_tensors(
            *(
                Scope(values=dict(vars(module)), owner=f"variable '{{}}' in {Path(file).name}")
                for module, file in _user_modules()
            )
        )


def _owner_of_storages(owned: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """Map the identity of each storage to its first owner."""
    owners: dict[int, str] = {}
    for owner, tensor in owned:
        with PassOver():  # a tensor of a user's class without a storage
            owners.setdefault(storage_id(tensor.untyped_storage()), owner)
    return owners


def _user_modules() -> Iterator[tuple[ModuleType, str]]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and not is_library(file) and not is_of_memcallback(file):
            yield module, file
