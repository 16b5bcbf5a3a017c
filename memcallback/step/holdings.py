"""Count the bytes of parameters, buffers, gradients, optimizer state and input on one device.

Storages are counted, not tensors: a tied weight or a view adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from memcallback.core.step_memory import Holdings
from memcallback.core.tensors import is_on, storage_bytes, storages_of, tensors_in
from memcallback.core.torch_private import storage_id
from memcallback.core.types import Category


def holdings(
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    batch: object,
    device: torch.device,
) -> Holdings:
    """Count what models, optimizers and a batch hold on a device."""
    modules = list(modules)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    by_category: dict[Category, int] = {}
    storages: dict[int, int] = {}
    # By identity: storages without data (on the meta device) have no address.
    counted: set[int] = set()
    devices: dict[torch.device, bool] = {}
    sources: tuple[tuple[Category, Iterable[torch.Tensor]], ...] = (
        (Category.PARAMETER, parameters),
        (Category.BUFFER, chain.from_iterable(module.buffers() for module in modules)),
        (
            Category.GRADIENT,
            (parameter.grad for parameter in parameters if parameter.grad is not None),
        ),
        (Category.OPTIMIZER_STATE, chain.from_iterable(map(_state_tensors, optimizers))),
        (Category.INPUT, tensors_in(batch)),
    )
    for category, tensors in sources:
        category_bytes = 0
        for tensor in tensors:
            for storage in (
                (tensor.untyped_storage(),) if _is_plain(tensor) else storages_of(tensor)
            ):
                where, identity = storage.device, storage_id(storage)
                if where not in devices:
                    devices[where] = is_on(where, device)
                if not devices[where] or identity in counted:
                    continue
                counted.add(identity)
                num_bytes, address = storage.nbytes(), storage.data_ptr()
                category_bytes += num_bytes
                if address:
                    storages[address] = num_bytes
        by_category[category] = category_bytes
    return Holdings(by_category=by_category, storages=storages)


def states_of(optimizer: torch.optim.Optimizer) -> list[tuple[Any, Any]]:
    """An optimizer's parameters with their state."""
    # ZeroRedundancyOptimizer keeps it in an optimizer of the rank's own parameters.
    own = getattr(optimizer, "optim", None)
    return list((own if isinstance(own, torch.optim.Optimizer) else optimizer).state.items())


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state, usually a dict of tensors for each parameter."""
    for _, state in states_of(optimizer):
        for value in list(state.values()) if type(state) is dict else (state,):
            if isinstance(value, torch.Tensor):
                yield value
            else:
                yield from tensors_in(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor certainly has one storage: the fast path, as nearly all have."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of DistributedDataParallel's gradient buckets, if they are no views of gradients."""
    return storage_bytes([parameter for parameter in model.parameters() if parameter.requires_grad])
