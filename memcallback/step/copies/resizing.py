"""Change the batch size or sequence length of a fake batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch

from memcallback.core.tensors import (
    dense_parts,
    fake_with_values,
    jagged_like,
    known_values,
    resized_lengths,
    resized_sparse,
    tensors_in,
    walk,
)
from memcallback.core.torch_private import FakeTensor
from memcallback.step.copies.known import resized_values, set_values
from memcallback.step.copies.objects import copy_with
from memcallback.step.sample_lists import sample_list

T = TypeVar("T")
_CPU = torch.device("cpu")


def resize_batch(
    batch: T, batch_size: int, new_batch_size: int, *, lengths: tuple[int, int] | None = None
) -> T:
    """Copy a fake batch with another number of samples, and optionally another sequence length."""
    for name, size in (("batch_size", batch_size), ("new_batch_size", new_batch_size)):
        if size < 0:
            raise ValueError(f"{name} is a number of samples and cannot be negative, got {size}.")
    resizer = _Resizer(batch_size, new_batch_size, lengths)
    resized: T = copy_with(resizer.with_samples(batch), resizer)
    return resized


def has_samples(batch: object, batch_size: int) -> bool:
    """Whether a tensor's first dimension, or a list's length, is the number of samples."""
    is_first = any(
        tensor.dim() > 0 and tensor.shape[0] == batch_size for tensor in tensors_in(batch)
    )
    return is_first or _Resizer(batch_size, batch_size, None).has_lists(batch)


class _Resizer:
    """Resizes a batch: its lists first, then each of its tensors."""

    def __init__(
        self, batch_size: int, new_batch_size: int, lengths: tuple[int, int] | None
    ) -> None:
        self._batch_size, self._new_batch_size = batch_size, new_batch_size
        self._lengths = lengths
        #: Tensors of single samples by id.
        self._single: dict[int, torch.Tensor] = {}
        #: Offsets of nested tensors and their replacements by id: tensors that share offsets have
        #: the same shape.
        self._offsets: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def has_lists(self, batch: object) -> bool:
        """Whether a batch holds a list with an item for each sample."""
        return any(
            isinstance(value, (list, tuple))
            and type(value) in (list, tuple)  # a namedtuple has fields, not samples
            and self._is_of_samples(value, is_inside=value is not batch)
            for value in walk([batch], lambda value: [item for _, item in _items(value)] or None)
        )

    def with_samples(self, value: Any, *, is_inside: bool = False) -> Any:
        """A container with every list of samples resized; the same object if it has none."""
        if type(value) in (list, tuple) and self._is_of_samples(value, is_inside=is_inside):
            return self._as_many(value)
        items = _items(value)
        changed = {
            key: resized
            for key, item in items
            if (resized := self.with_samples(item, is_inside=True)) is not item
        }
        return _with_items(value, changed) if changed else value

    def _is_of_samples(self, values: Sequence[object], *, is_inside: bool) -> bool:
        """Whether a list has an item for each sample, rather than tensors of all samples."""
        sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_in(values)}
        if len(values) != self._batch_size or not sizes:
            return False
        if not is_inside and any(
            isinstance(value, (torch.Tensor, list, tuple)) for value in values
        ):  # the batch itself: mostly a list of its parts
            found = sample_list(values, is_inside=False)
            return found is not None and found.are_samples
        # Targets of each image: their tensors may happen to have that size too.
        are_records = is_inside and all(isinstance(value, Mapping) for value in values)
        return are_records or sizes != {self._batch_size}

    def _as_many(self, values: Any) -> Any:
        own = values[: self._new_batch_size]
        more = [
            copy_with(values[index % len(values)], _another)
            for index in range(len(values), self._new_batch_size)
        ]
        resized = type(values)([*own, *more])
        self._single.update((id(tensor), tensor) for tensor in tensors_in(resized))
        return resized

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Resize a tensor."""
        fake: Any = tensor if isinstance(tensor, FakeTensor) else tensor._values
        with fake.fake_mode, torch.no_grad():
            if tensor.layout is torch.jagged:
                resized = self._jagged(tensor)
            elif tensor.layout is torch.sparse_coo:
                # The matrix of a graph has a row and a column for each sample.
                resized = resized_sparse(tensor, self._shape(tensor, tensor.sparse_dim()))
            else:
                shape = self._shape(tensor, 1)
                resized = _empty_in_order_of(tensor, shape)
                if (values := resized_values(tensor, shape)) is not None:
                    set_values(resized, values)
        return resized.requires_grad_(tensor.requires_grad)

    def _shape(self, tensor: torch.Tensor, num_sample_dims: int) -> tuple[int, ...]:
        num_sample_dims = 0 if id(tensor) in self._single else num_sample_dims

        def size_of(dim: int, size: int) -> int:
            if size == self._batch_size and dim < num_sample_dims:
                return self._new_batch_size
            return self._lengths[1] if self._lengths and dim and size == self._lengths[0] else size

        return tuple(size_of(dim, size) for dim, size in enumerate(tensor.shape))

    def _jagged(self, tensor: Any) -> torch.Tensor:
        values, offsets = dense_parts(tensor)
        known = known_values(offsets)
        assert known is not None, "fake_copy knows the offsets"
        count = self._new_batch_size if len(known) == self._batch_size + 1 else len(known) - 1
        ends = [
            0,
            *accumulate(resized_lengths([end - start for start, end in pairwise(known)], count)),
        ]
        if id(offsets) not in self._offsets:
            self._offsets[id(offsets)] = offsets, fake_with_values(offsets, ends)
        shape = list(values.shape)
        shape[tensor._ragged_idx - 1] += ends[-1] - known[-1]
        return jagged_like(tensor, _empty_in_order_of(values, shape), self._offsets[id(offsets)][1])


def _items(value: object) -> list[tuple[Any, Any]]:
    """A container's items with their keys, indices or field names."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)
        ]
    return []


def _with_items(value: Any, changed: Mapping[Any, object]) -> Any:
    """A shallow copy of a container with some items replaced."""
    if isinstance(value, (list, tuple)):
        items: list[Any] = [changed.get(index, item) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)
    for key, item in changed.items():
        if isinstance(result, Mapping):
            result[key] = item  # type: ignore[index]
        else:
            object.__setattr__(result, key, item)
    return result


def _another(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, in a storage of its own."""
    return _Resizer(0, 0, None)(tensor)


def _empty_in_order_of(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An empty tensor whose dimensions have the same memory order as another tensor's."""
    strides = [0] * len(shape)
    step = 1
    # Smallest stride first; of equal strides the last dimension first, as in a contiguous tensor.
    for dim in sorted(range(len(shape)), key=lambda dim: (tensor.stride(dim), -dim)):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            continue
        strides[dim] = step
        step *= max(shape[dim], 1)
    return torch.empty_strided(tuple(shape), strides, dtype=tensor.dtype, device=_CPU)
