"""Count the bytes of parameters, buffers, gradients, optimizer state and input on one device.

Storages are counted, not tensors: a tied weight or a view adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from memcallback.core.interruptions import raise_if_meant
from memcallback.core.step_memory import Holdings
from memcallback.core.tensors import is_on, storage_bytes, storages_of, tensors_in
from memcallback.core.torch_private import storage_id
from memcallback.core.types import Category
from memcallback.step.copies.optimizers import with_owned
from memcallback.step.sample_lists import MOST_OBJECTS


def holdings(
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    batch: object,
    device: torch.device,
) -> Holdings:
    """Count what models, optimizers and a batch hold on a device."""
    return HoldingsCounter(modules, optimizers, device).count(batch)


class HoldingsCounter:
    """Counts what models, optimizers and a batch hold on a device, at several moments of a step.

    It walks the models once: the modules in them stay the same in a step. `also` are modules and
    containers of tensors beside the models.
    """

    def __init__(
        self,
        models: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
        also: Iterable[object] = (),
    ) -> None:
        also = list(also)
        roots = [*models, *(item for item in also if isinstance(item, torch.nn.Module))]
        self._modules = list(dict.fromkeys(part for root in roots for part in root.modules()))
        self._tensors = [item for item in also if not isinstance(item, torch.nn.Module)]
        self._optimizers = list(optimizers)
        self._device = device

    def count(self, batch: object) -> Holdings:
        """Count what is held now."""
        # parameters() and buffers() of a module alone take several times as long.
        parameters = [
            parameter
            for module in self._modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        buffers = (buffer for module in self._modules for buffer in module._buffers.values())
        gradients = (parameter.grad for parameter in parameters)
        sources: tuple[tuple[Category, Iterable[torch.Tensor | None]], ...] = (
            (Category.PARAMETER, chain(parameters, tensors_in(self._tensors))),
            (Category.BUFFER, buffers),
            (Category.GRADIENT, gradients),
            (Category.OPTIMIZER_STATE, chain.from_iterable(map(_state_tensors, self._optimizers))),
            (Category.INPUT, tensors_in(batch, most=MOST_OBJECTS)),
        )
        by_category: dict[Category, int] = {}
        storages: dict[int, int] = {}
        # By identity: storages without data (on the meta device) have no address.
        counted: set[int] = set()
        devices: dict[torch.device, bool] = {}
        for category, tensors in sources:
            category_bytes = 0
            for tensor in tensors:
                if tensor is None:
                    continue
                for storage in _storages(tensor):
                    identity = storage_id(storage)
                    if identity in counted:
                        continue
                    where = storage.device
                    if where not in devices:
                        devices[where] = is_on(where, self._device)
                    if not devices[where]:
                        continue
                    counted.add(identity)
                    num_bytes, address = storage.nbytes(), storage.data_ptr()
                    category_bytes += num_bytes
                    if address:
                        storages[address] = num_bytes
            by_category[category] = category_bytes
        return Holdings(by_category=by_category, storages=storages)


def written_storages(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[int, int]:
    """Address -> bytes of the storages on the host that an update writes.

    Those of trained parameters, their gradients and the optimizers' state.
    """
    trained = [
        parameter for model in models for parameter in model.parameters() if parameter.requires_grad
    ]
    gradients = (parameter.grad for parameter in trained if parameter.grad is not None)
    states = chain.from_iterable(map(_state_tensors, optimizers))
    return {
        storage.data_ptr(): storage.nbytes()
        for tensor in chain(trained, gradients, states)
        for storage in _storages(tensor)
        if storage.device.type == "cpu"
    }


def states_of(optimizer: torch.optim.Optimizer) -> list[tuple[Any, Any]]:
    """An optimizer's parameters with their state, also in optimizers that it owns."""
    return [item for one in with_owned(optimizer) for item in one.state.items()]


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state, usually a dict of tensors for each parameter."""
    for _, state in states_of(optimizer):
        for value in list(state.values()) if type(state) is dict else (state,):
            if isinstance(value, torch.Tensor):
                yield value
            else:
                yield from tensors_in(value)


def _storages(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    """The storages of a tensor; none of one that cannot be read (MKL-DNN, a user's own class)."""
    # The fast path, as nearly all have one storage.
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    try:
        storages = list(storages_of(tensor))
        for storage in storages:
            storage.data_ptr()
    except Exception as error:  # a user's class can fail in any way
        raise_if_meant(error)
        return ()
    return storages


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of DistributedDataParallel's gradient buckets, if they are no views of gradients."""
    return storage_bytes([parameter for parameter in model.parameters() if parameter.requires_grad])
