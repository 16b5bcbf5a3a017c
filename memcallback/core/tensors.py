"""Tensor utilities: find tensors in a batch, their storages, the dense parts of
sparse/nested/DTensors. (The one module of core that imports torch.).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, pairwise
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, torch.nn.Module)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum(
        {
            storage._cdata: storage.nbytes()
            for tensor in tensors
            for storage in storages_of(tensor)
        }.values()
    )


def own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors' own elements, at most those of their storages; for a view of a large
    storage, what a copy of it would take.
    """
    elements: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        for storage in storages_of(tensor):
            sizes[storage._cdata] = storage.nbytes()
            elements[storage._cdata] = (
                elements.get(storage._cdata, 0) + tensor.numel() * tensor.element_size()
            )
    return sum(min(size, elements[storage]) for storage, size in sizes.items())


def is_on(device: torch.device, wanted: torch.device) -> bool:
    """Whether a device is the wanted one; a wanted device without an index is any of its type."""
    return device.type == wanted.type and (
        wanted.index is None or device.index in (None, wanted.index)
    )


def tensors_in(obj: object) -> Iterator[torch.Tensor]:
    """Every tensor in a nesting of mappings, sequences, sets, dataclasses and objects, in order,
    each object visited once.
    """
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
        # Batches of other libraries (graphs, tokenized text) keep their tensors in attributes.
        # Functions and modules of Python have attributes too, and would lead everywhere.
        if callable(obj) or isinstance(obj, ModuleType):
            return []
        slots = (name for kind in type(obj).__mro__ for name in vars(kind).get("__slots__", ()))
        return (
            list(vars(obj).values())
            if hasattr(obj, "__dict__")
            else [getattr(obj, name, None) for name in slots]
        )
    except (
        Exception
    ):  # an object without attributes, or one of a user's that fails when it is asked
        return []


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: one, or those of the tensors that a sparse tensor or a wrapper
    such as DTensor consists of.
    """
    for part in parts_of(tensor):
        yield part.untyped_storage()


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with one storage each that a tensor consists of: itself, or the parts of a sparse
    tensor or a wrapper such as DTensor.
    """
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


_NOT_OF_WRAPPERS = (torch.Tensor.__torch_dispatch__, FakeTensor.__torch_dispatch__)
_CPU = torch.device("cpu")
_EXTREMES = {"max_seqlen": max, "min_seqlen": min}
#: Above all that PyTorch has given out for real tensors.
_RAGGED = count(1 << 40)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that own the storages of a tensor: itself, indices and values of a sparse one,
    values and offsets of a jagged one, a rank's own part of a DTensor.
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is torch.jagged:
        return tensor._values, tensor._offsets  # type: ignore[attr-defined, return-value]
    return tuple(parts_of(tensor)) if is_wrapper(type(tensor)) else (tensor,)


@cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class take operators apart themselves, as nested ones and DTensors do."""
    return issubclass(kind, torch.Tensor) and (
        hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ not in _NOT_OF_WRAPPERS
    )


def sparse_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], *, is_coalesced: bool = False
) -> torch.Tensor:
    """A sparse tensor of these very indices, of shape (sparse dimensions, elements), and values, of
    shape (elements, *dense dimensions).
    """
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default(
        *(indices.shape[0], values.dim() - 1, list(shape), indices, values),
        **{
            "dtype": values.dtype,
            "layout": torch.sparse_coo,
            "device": _CPU,
            "is_coalesced": is_coalesced,
        },
    )
    return made


def jagged_like(tensor: Any, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A nested tensor of these very parts, ragged in the same dimension as another one, that knows
    its longest length if that does.
    """
    ends = known_values(offsets)
    assert ends is not None, "offsets of fakes are known"
    lengths = [end - start for start, end in pairwise(ends)]
    with no_dispatch(), torch._C.DisableTorchFunction():
        # PyTorch keeps them as shapes of empty tensors.
        known = {
            name: torch.zeros(of(lengths), 0)
            for name, of in _EXTREMES.items()
            if name in tensor._metadata_cache
        }
    made: torch.Tensor = type(tensor)(
        values, offsets, _ragged_idx=tensor._ragged_idx, _metadata_cache=known
    )
    return made


def known_values(tensor: torch.Tensor) -> list[int] | None:
    """The values of a fake tensor of whole numbers that are known, as those that Python code wrote
    down.
    """
    constant: torch.Tensor | None = getattr(tensor, "constant", None)
    with no_dispatch():
        return None if constant is None else constant.tolist()


def fake_with_values(like: Any, values: Sequence[int]) -> torch.Tensor:
    """A fake of whole numbers that are known, in a storage of its own: the offsets of nested
    tensors of one shape.
    """
    with no_dispatch(), torch._C.DisableTorchFunction():
        shape, constant = (
            torch.empty(len(values), dtype=like.dtype, device="meta"),
            torch.tensor(values, dtype=like.dtype),
        )
    fake = FakeTensor(like.fake_mode, shape, _CPU, constant=constant)
    fake.nested_int_memo = new_ragged_size()
    return fake


def new_ragged_size() -> torch.SymInt:
    """The size of a ragged dimension, which is no number and equals itself alone. Only compilers'
    fakes have one by themselves.
    """
    size: torch.SymInt = torch._C._get_nested_int(next(_RAGGED), 1)
    return size


def resized_sparse(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A sparse tensor of another shape, with as many elements for each further row as there are for
    one now, rounded up.
    """
    indices, values = dense_parts(tensor)
    num_dims, number = indices.shape
    number = max(number + (shape[0] - tensor.shape[0]) * -(-number // max(tensor.shape[0], 1)), 0)
    parts = indices.new_empty(num_dims, number), values.new_empty(number, *shape[num_dims:])
    return sparse_tensor(*parts, shape, is_coalesced=tensor.is_coalesced())


def resized_lengths(lengths: Sequence[int], number: int) -> list[int]:
    """The lengths of another number of sequences: each further one as long as the mean, rounded up;
    of fewer, their sum spread evenly.
    """
    mean = -(-sum(lengths) // max(len(lengths), 1))
    if number >= len(lengths):
        return [*lengths, *[mean] * (number - len(lengths))]
    total = max(sum(lengths) - (len(lengths) - number) * mean, number)
    return [total // number + (sample < total % number) for sample in range(number)]
