"""What is on the device, how it gets there, and what is to say so although it is a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memcallback.core.tensors import tensors_in, walk
from memcallback.core.torch_private import storage_id
from memcallback.step.copies.functions import contents_of
from memcallback.step.copies.known import set_values, values_of
from memcallback.trace.dispatch.mode import CUDA
from memcallback.trace.marks import in_order_of_moving


def is_on_device(it: object) -> bool:
    """Whether a tensor of a module, or in a container, is on a CUDA device."""
    return any(tensor.is_cuda for tensor in _tensors_of(it))


def holders_in(it: object) -> list[Any]:
    """An object, and the modules in it if it is a container: each holds tensors of its own."""
    if isinstance(it, torch.nn.Module):
        return [it]
    return [it, *(one for one in walk([it], contents_of) if isinstance(one, torch.nn.Module))]


def show_device(roots: Iterable[object]) -> None:
    """Let the modules in some objects, whose copies are on the host, say that they are not."""
    for root in roots:
        for module in _modules_in(root):
            for name, value in vars(module).items():
                if isinstance(value, torch.device):
                    vars(module)[name] = CUDA


def move(model: torch.nn.Module) -> None:
    """Give each tensor of a copied model a storage of its own, as `nn.Module.to` does.

    A buffer that several modules have becomes several; a parameter stays one.
    """
    known: set[int] = set()
    storages: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) in known:
                    setattr(module, name, _alike(buffer))
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if id(tensor) not in known and tensor.layout is torch.strided:
                    _move(tensor, storages)
                known.add(id(tensor))


def _move(tensor: torch.Tensor, storages: set[int]) -> None:
    """Give a tensor a storage as large as itself, if it has a part of one, or one of these."""
    storage = tensor.untyped_storage()
    if storage_id(storage) in storages or storage.nbytes() != tensor.nbytes:
        values, alone = values_of(tensor), torch.empty_like(tensor)
        tensor.set_(alone.untyped_storage(), 0, alone.size(), alone.stride())
        if values is not None:
            set_values(tensor, values)
    storages.add(storage_id(tensor.untyped_storage()))


def _alike(buffer: torch.Tensor) -> torch.Tensor:
    """Another fake like a buffer, with the values that are known of it."""
    other, values = torch.empty_like(buffer), values_of(buffer)
    if values is not None:
        set_values(other, values)
    return other


def _tensors_of(it: object) -> Iterator[torch.Tensor]:
    if isinstance(it, torch.nn.Module):
        return (tensor for _, tensor in in_order_of_moving(it))
    return tensors_in(it)


def _modules_in(root: object) -> Iterator[torch.nn.Module]:
    """A module and all below it, those in plain lists and mappings too."""
    seen: set[int] = set()
    left = [root]
    while left:
        found = left.pop()
        if id(found) in seen or not isinstance(found, (torch.nn.Module, list, tuple, dict)):
            continue
        seen.add(id(found))
        if isinstance(found, torch.nn.Module):
            yield found
            left += [*found.children(), *vars(found).values()]
        else:
            left += contents_of(found) or ()
