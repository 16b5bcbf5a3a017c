"""Moving: what `nn.Module.to` makes of the storages of a model that is not on the device yet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from memcallback.core.tensors import (
    dense_parts,
    fake_with_values,
    jagged_like,
    known_values,
    lay,
    sparse_tensor,
)
from memcallback.core.torch_private import DisableTorchFunction, no_dispatch, storage_id
from memcallback.step.copies.known import set_values, values_of
from memcallback.trace.on_device import is_on_device


class Moving:
    """Gives each tensor of copied modules a storage of its own, as they move one after another.

    A parameter stays one wherever it comes up; a buffer that is in several places becomes several
    (`nn.Module._apply`).
    """

    def __init__(self, *modules: tuple[object, object]) -> None:
        """Take objects and their copies, of which copies of modules on the host are moved."""
        self._roots = [
            copy for it, copy in modules if isinstance(copy, nn.Module) and not is_on_device(it)
        ]
        self._modules: set[int] = set()
        #: Of parameters that have moved, and of buffers.
        self._known: set[int] = set()
        self._storages: set[int] = set()

    def run(self) -> None:
        """Move them."""
        with torch.no_grad():
            for module in chain.from_iterable(map(self._children_first, self._roots)):
                for parameter in module.parameters(recurse=False):
                    if id(parameter) not in self._known:
                        self._known.add(id(parameter))
                        self._part(parameter)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = self._moved(buffer)

    def _children_first(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules in one and itself, but for those that came before."""
        if id(module) not in self._modules:
            self._modules.add(id(module))
            for child in module.children():
                yield from self._children_first(child)
            yield module

    def _moved(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer, or another like it if it is in a second place."""
        is_parameter, is_known = isinstance(buffer, nn.Parameter), id(buffer) in self._known
        if is_parameter and is_known:
            return buffer
        is_part = buffer.layout is not torch.strided and _is_part(buffer)
        moved = _alike(buffer) if is_parameter or is_known or is_part else buffer
        self._known.add(id(moved))
        self._part(moved)
        return moved

    def _part(self, tensor: torch.Tensor) -> None:
        """Part a tensor from the rest of its storage, and from others that share it."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage_id(storage) in self._storages or storage.nbytes() != tensor.nbytes:
            values, alone = values_of(tensor), torch.empty_like(tensor)
            lay(tensor, alone.untyped_storage(), 0, alone.stride())
            if values is not None:
                set_values(tensor, values)
        self._storages.add(storage_id(tensor.untyped_storage()))


def _is_part(buffer: torch.Tensor) -> bool:
    """Whether a sparse or jagged tensor has parts of larger storages."""
    return any(one.untyped_storage().nbytes() != one.nbytes for one in dense_parts(buffer))


def _alike(buffer: torch.Tensor) -> torch.Tensor:
    """Another fake like a buffer, with the values that are known of it."""
    if buffer.layout is torch.sparse_coo:
        indices, values = map(_alike, dense_parts(buffer))
        other = sparse_tensor(indices, values, buffer.shape, is_coalesced=buffer.is_coalesced())
        return other.requires_grad_(buffer.requires_grad)
    if buffer.layout is torch.jagged:
        values, offsets = dense_parts(buffer)
        numbers = known_values(offsets)
        assert numbers is not None, "offsets of fakes are known"
        ends: Any = fake_with_values(offsets, numbers)
        ends.nested_int_memo = offsets.nested_int_memo  # type: ignore[attr-defined]
        other = jagged_like(buffer, _alike(values), ends)
        return other.requires_grad_(buffer.requires_grad)
    other, known = torch.empty_like(buffer), values_of(buffer)
    if known is not None:
        with DisableTorchFunction(), no_dispatch():
            set_values(other, known.clone())
    return other.requires_grad_(buffer.requires_grad)
