"""What is on the device, and what is to say so although its copy is on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memcallback.core.tensors import tensors_in, walk
from memcallback.step.copies.functions import contents_of
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
