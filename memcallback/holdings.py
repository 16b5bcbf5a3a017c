"""Which storages a training holds, and for what: parameters, buffers, gradients, optimizer state, input.

Storages are counted, not tensors: a tied weight or a view adds nothing. Only those on one device count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memcallback.events import Category

_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, torch.nn.Module)


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What is held at one moment.

    Attributes:
        by_category: Bytes of storages for each of parameter, buffer, gradient, optimizer state and input; a storage
            that serves several counts in the first of them.
        storages: Address of each storage on the device -> its bytes; those without data have none.
    """

    by_category: Mapping[Category, int]
    storages: Mapping[int, int]


def holdings(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], batch: object, device: torch.device
) -> Holdings:
    """Count what models, optimizers and a batch hold on a device.

    Args:
        modules: The models.
        optimizers: The optimizers; their own state is read.
        batch: Any nesting of dicts, lists, tuples, dataclasses and objects with tensors in it; None for no batch.
        device: Storages elsewhere are left out. A device without an index stands for all of its type.

    Returns:
        Bytes by category, and the storages.
    """
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
        (Category.GRADIENT, (parameter.grad for parameter in parameters if parameter.grad is not None)),
        (Category.OPTIMIZER_STATE, chain.from_iterable(map(_state_tensors, optimizers))),
        (Category.INPUT, tensors_in(batch)),
    )
    for category, tensors in sources:
        category_bytes = 0
        for tensor in tensors:
            for storage in (tensor.untyped_storage(),) if _is_plain(tensor) else storages_of(tensor):
                where, identity = storage.device, storage._cdata
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
    """What an optimizer keeps, with the parameter for which it does; `ZeroRedundancyOptimizer` does so in the optimizer of a rank's own part."""
    own = getattr(optimizer, "optim", None)
    return list((own if isinstance(own, torch.optim.Optimizer) else optimizer).state.items())


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Those of an optimizer's state, which as a rule is a dict of tensors for each parameter; its keys are no state."""
    for _, state in states_of(optimizer):
        for value in list(state.values()) if type(state) is dict else (state,):
            if isinstance(value, torch.Tensor):
                yield value
            else:
                yield from tensors_in(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one storage: most have, and of them that is all there is to ask."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum({storage._cdata: storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}.values())


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of the buckets in which DistributedDataParallel sums gradients, as large as these (gradient_as_bucket_view=False)."""
    return storage_bytes([parameter for parameter in model.parameters() if parameter.requires_grad])


def own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors' own elements, at most those of their storages; for a view of a large storage, what a copy of it would take."""
    elements: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        for storage in storages_of(tensor):
            sizes[storage._cdata] = storage.nbytes()
            elements[storage._cdata] = elements.get(storage._cdata, 0) + tensor.numel() * tensor.element_size()
    return sum(min(size, elements[storage]) for storage, size in sizes.items())


def is_on(device: torch.device, wanted: torch.device) -> bool:
    """Whether a device is the wanted one; a wanted device without an index is any of its type."""
    return device.type == wanted.type and (wanted.index is None or device.index in (None, wanted.index))


def tensors_in(obj: object) -> Iterator[torch.Tensor]:
    """Every tensor in a nesting of mappings, sequences, sets, dataclasses and objects, in order, each object visited once."""
    seen: set[int] = set()
    return _tensors_in(obj, seen)


def _tensors_in(obj: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        yield obj
        return
    if isinstance(obj, _LEAVES) or id(obj) in seen:
        return
    seen.add(id(obj))
    for child in _children(obj):
        yield from _tensors_in(child, seen)


def _children(obj: object) -> list[object]:
    try:
        if isinstance(obj, Mapping):
            return list(obj.values())
        if isinstance(obj, (list, tuple, set, frozenset)):
            return list(obj)
        if dataclasses.is_dataclass(obj):
            return [getattr(obj, field.name, None) for field in dataclasses.fields(obj)]
        # Batches of other libraries (graphs, tokenized text) keep their tensors in attributes. Functions and modules of
        # Python have attributes too, and would lead everywhere.
        if callable(obj) or isinstance(obj, ModuleType):
            return []
        slots = (name for kind in type(obj).__mro__ for name in vars(kind).get("__slots__", ()))
        return list(vars(obj).values()) if hasattr(obj, "__dict__") else [getattr(obj, name, None) for name in slots]
    except Exception:  # an object without attributes, or one of a user's that fails when it is asked
        return []


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: one, or those of the tensors that a sparse tensor or a wrapper such as DTensor consists of."""
    for part in parts_of(tensor):
        yield part.untyped_storage()


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with one storage each that a tensor consists of: itself, or the parts of a sparse tensor or a wrapper such as DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            # A DTensor has its mesh among them from PyTorch 2.13 on.
            if isinstance(part, torch.Tensor):
                yield from parts_of(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif not torch.nn.parameter.is_lazy(tensor):
        yield tensor
