"""What the second forward pass of checkpointed modules finds as the first found it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from memcallback.core.torch_private import BatchNormBase as _NormBase


class AsInFirstPass:
    """A context for the second pass: modules have the buffers and random numbers of the first.

    It is made before the first pass and may be entered several times. Only modules in training have
    copies of their buffers. PyTorch's norm layers get copies of their present buffers: in training
    they do not read their running statistics, so those of the first pass are not kept.
    """

    def __init__(self, modules: Sequence[nn.Module], inputs: Iterable[torch.Tensor]) -> None:
        every = dict.fromkeys(chain.from_iterable(module.modules() for module in modules))
        held = (chain(module._parameters.values(), module._buffers.values()) for module in every)
        self._on_devices = _one_of_each_device(chain(inputs, chain.from_iterable(held)))
        self._modules = [module for module in every if module.training and module._buffers]
        self._first = {module: _copies(module) for module in self._modules if not _is_norm(module)}
        self._now: dict[nn.Module, dict[str, torch.Tensor | None]] = {}
        self._draw_as_first = _draw_as_now(self._on_devices)
        self._draw_on: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._draw_on = _draw_as_now(self._on_devices)
        self._now = {module: dict(module._buffers) for module in self._modules}
        for module, first in self._first.items():
            module._buffers.update(first)
        for module in self._modules:
            module._buffers.update(_copies(module))
        for restore in self._draw_as_first:
            restore()

    def __exit__(self, *exception: object) -> None:
        # PyTorch ends a recomputation by an exception as soon as it has what it needs.
        for module, now in self._now.items():
            module._buffers.update(now)
        for restore in self._draw_on:
            restore()
        self._now, self._draw_on = {}, []


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")


def _copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: buffer.detach().clone()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _one_of_each_device(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """A tensor on each device that has a random number generator of its own."""
    found = {tensor.device: tensor for tensor in tensors if tensor is not None}
    return [
        tensor
        for device, tensor in found.items()
        if getattr(getattr(torch, device.type, None), "_initialized", False)
    ]


def _draw_as_now(on_devices: Sequence[torch.Tensor]) -> list[Callable[[], None]]:
    """Functions that put back the present states of generators that many draw from.

    PyTorch itself restores that of the CPU, and those of the devices of a block's arguments where
    these are tensors, or in containers of Python.
    """
    restore: list[Callable[[], None]] = [partial(random.setstate, random.getstate())]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        restore.append(partial(numpy_random.set_state, numpy_random.get_state(legacy=False)))
    for tensor in on_devices:
        indices, states = torch_checkpoint.get_device_states(tensor)
        kind = tensor.device.type
        restore.append(
            partial(torch_checkpoint.set_device_states, indices, states, device_type=kind)
        )
    return restore
