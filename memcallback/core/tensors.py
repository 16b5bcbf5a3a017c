"""Find tensors in objects, their storages, and the dense parts of sparse and nested tensors.

The one module of core that imports torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, islice, pairwise
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch

from memcallback.core.by_class import by_class
from memcallback.core.interruptions import PassOver, raise_if_meant
from memcallback.core.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    is_traceable_wrapper_subclass,
    nested_int,
    no_dispatch,
    storage_id,
)

_LEAVES = (
    *(torch.Tensor, torch.nn.Module, type, type(None)),
    *(str, bytes, bytearray, int, float, complex, bool),
)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum(
        {
            storage_id(storage): storage.nbytes()
            for tensor in tensors
            for storage in storages_of(tensor)
        }.values()
    )


def own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors' own elements: for a view of a large storage, the size of a copy."""
    elements: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        for storage in storages_of(tensor):
            sizes[storage_id(storage)] = storage.nbytes()
            elements[storage_id(storage)] = (
                elements.get(storage_id(storage), 0) + tensor.numel() * tensor.element_size()
            )
    return sum(min(size, elements[storage]) for storage, size in sizes.items())


def is_on(device: torch.device, wanted: torch.device) -> bool:
    """Whether a device is the wanted one; a wanted device without an index is any of its type."""
    return device.type == wanted.type and (
        wanted.index is None or device.index in (None, wanted.index)
    )


def walk(
    roots: Iterable[object],
    children: Callable[[object], Iterable[object] | None],
    seen: dict[int, object] | None = None,
) -> Iterator[object]:
    """Walk depth first from some objects to all that they hold, visiting each object once.

    A leaf, for which `children` returns None, is yielded each time. `seen` keeps the others alive
    by their id, so that no later object gets the same id.
    """
    seen = {} if seen is None else seen
    pending = [iter(roots)]
    while pending:
        for obj in pending[-1]:
            if id(obj) in seen:
                continue
            inner = children(obj)
            if inner is not None:
                seen[id(obj)] = obj
            yield obj
            if inner is not None:
                pending.append(iter(inner))
                break
        else:
            pending.pop()


def tensors_in(obj: object, *, most: int | None = None) -> Iterator[torch.Tensor]:
    """Every tensor in a nesting of mappings, sequences, sets, dataclasses and objects, in order.

    Of many objects the first `most` are searched.
    """
    items = islice(walk([obj], children), most)
    return (item for item in items if isinstance(item, torch.Tensor))


def children(obj: object) -> list[object] | None:
    """What an object holds, for `walk`; None for a leaf."""
    if isinstance(obj, _LEAVES):
        return None
    try:
        items = items_of(obj)
        if items is not None:
            return items
        # Functions and modules of Python have attributes too, and would lead everywhere.
        if inspect.isroutine(obj) or isinstance(obj, (ModuleType, partial)):
            return []
        # Batches of other libraries (graphs, tokenized text) keep their tensors in attributes.
        values = attributes(obj)
        if dataclasses.is_dataclass(obj):
            return [values[one.name] for one in dataclasses.fields(obj) if one.name in values]
        return list(values.values())
    except Exception as error:  # a user's object may fail when it is read
        raise_if_meant(error)
        return []


def items_of(obj: Any) -> list[Any] | None:
    """The items of a container of Python, of a mapping its values; None for any other object.

    They are read past the methods of the object's class, which may compute items as they are read.
    """
    container: Any
    for container in (list, tuple, set, frozenset, deque):
        if isinstance(obj, container):
            return list(container.__iter__(obj))
    if isinstance(obj, dict):
        return list(dict.values(obj))
    if isinstance(obj, WeakValueDictionary):
        return list(WeakValueDictionary.values(obj))
    return list(obj.values()) if isinstance(obj, MappingProxyType) else None


def attributes(obj: object) -> dict[str, object]:
    """An object's own attributes, in `__dict__` and slots, read past its `__getattr__`."""
    values: dict[str, object] = {}
    kind: type = type(obj)
    if (own := own_dict(obj)) is not None:
        # Another thread may change it meanwhile; a copy is made at once.
        values = {name: value for name, value in own.copy().items() if type(name) is str}
    for name in _slots(kind):
        member: Any = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
        with suppress(AttributeError):  # an empty slot
            values[name] = member.__get__(obj)
    return values


def own_dict(obj: object) -> dict[str, Any] | None:
    """An object's `__dict__`; None if it has none, or its class says itself what is there."""
    own: object = None
    if has_dict(type(obj)):
        with PassOver():  # a class in C may refuse
            own = object.__getattribute__(obj, "__dict__")
    return own if type(own) is dict else None


@by_class
def has_dict(kind: type) -> bool:
    """Whether objects of a class have a `__dict__` that Python gives: a property is user code."""
    # Past what a metaclass says. Most values of Python's own have none.
    spaces = map(namespace_of, type.__dict__["__mro__"].__get__(kind))
    given = [space["__dict__"] for space in spaces if "__dict__" in space]
    descriptors = (GetSetDescriptorType, MemberDescriptorType)
    return bool(given) and all(issubclass(type(each), descriptors) for each in given)


def namespace_of(kind: type) -> Mapping[str, Any]:
    """The attributes of a class itself, past what its metaclass says."""
    space: Mapping[str, Any] = type.__dict__["__dict__"].__get__(kind)
    return space


@by_class
def _slots(kind: type) -> tuple[str, ...]:
    """The names of a class's slots."""
    members = {
        name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()
    }
    # Of a SimpleNamespace `__dict__` is such a member too.
    return tuple(
        name
        for name, member in members.items()
        if inspect.ismemberdescriptor(member) and name != "__dict__"
    )


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: one, or those of the parts of a sparse tensor or a wrapper."""
    for part in parts_of(tensor):
        yield part.untyped_storage()


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, or the parts with a storage each of a sparse tensor or a wrapper (DTensor)."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            # From PyTorch 2.13 on the mesh of a DTensor is among them.
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


_CPU = torch.device("cpu")
_EXTREMES = {"max_seqlen": max, "min_seqlen": min}
#: Numbers of ragged sizes, above those that PyTorch uses for real tensors.
_RAGGED = count(1 << 40)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that own a tensor's storages: itself, or its parts if sparse, jagged, DTensor."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is torch.jagged:
        return tensor._values, tensor._offsets  # type: ignore[attr-defined, return-value]
    return tuple(parts_of(tensor)) if is_wrapper(type(tensor)) else (tensor,)


@by_class
def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class decompose operators themselves, such as nested and DTensors."""
    return issubclass(kind, torch.Tensor) and (
        hasattr(kind, "__tensor_flatten__")
        or kind.__torch_dispatch__
        not in (torch.Tensor.__torch_dispatch__, FakeTensor.__torch_dispatch__)
    )


def sparse_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], *, is_coalesced: bool = False
) -> torch.Tensor:
    """A COO tensor sharing indices (sparse dims, elements) and values (elements, *dense dims)."""
    sparse: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default(
        *(indices.shape[0], values.dim() - 1, list(shape), indices, values),
        **{
            "dtype": values.dtype,
            "layout": torch.sparse_coo,
            "device": _CPU,
            "is_coalesced": is_coalesced,
        },
    )
    return sparse


def jagged_like(tensor: Any, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A nested tensor that shares these parts, ragged in the same dimension as another one."""
    ends = known_values(offsets)
    assert ends is not None, "offsets of fakes are known"
    lengths = [end - start for start, end in pairwise(ends)]
    with no_dispatch(), DisableTorchFunction():
        # PyTorch keeps the longest and shortest length, if known, as shapes of empty tensors.
        known = {
            name: torch.zeros(extreme(lengths), 0)
            for name, extreme in _EXTREMES.items()
            if name in tensor._metadata_cache
        }
    jagged: torch.Tensor = type(tensor)(
        values, offsets, _ragged_idx=tensor._ragged_idx, _metadata_cache=known
    )
    return jagged


def known_values(tensor: torch.Tensor) -> list[int] | None:
    """The values of a fake tensor of whole numbers, if it was made from known ones; else None."""
    constant: torch.Tensor | None = getattr(tensor, "constant", None)
    with no_dispatch():
        return None if constant is None else constant.tolist()


def fake_with_values(like: Any, values: Sequence[int]) -> torch.Tensor:
    """A fake of known whole numbers in a storage of its own: offsets of nested tensors."""
    with no_dispatch(), DisableTorchFunction():
        shape, constant = (
            torch.empty(len(values), dtype=like.dtype, device="meta"),
            torch.tensor(values, dtype=like.dtype),
        )
    fake = FakeTensor(like.fake_mode, shape, _CPU, constant=constant)
    fake.nested_int_memo = new_ragged_size()
    return fake


def new_ragged_size() -> torch.SymInt:
    """A new size of a ragged dimension, equal only to itself; PyTorch makes none for our fakes."""
    size: torch.SymInt = nested_int(next(_RAGGED), 1)
    return size


def lay(
    fake: torch.Tensor, storage: torch.UntypedStorage, offset: int, strides: Sequence[int]
) -> None:
    """Put a fake in another storage, past PyTorch's cache of calls, which would keep it."""
    with DisableTorchFunction(), no_dispatch(), torch.no_grad():
        fake.set_(storage, offset, fake.size(), strides)


def resized_sparse(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A sparse tensor of another shape; further rows have the mean number of elements."""
    indices, values = dense_parts(tensor)
    num_dims, number = indices.shape
    number = max(number + (shape[0] - tensor.shape[0]) * -(-number // max(tensor.shape[0], 1)), 0)
    parts = indices.new_empty(num_dims, number), values.new_empty(number, *shape[num_dims:])
    return sparse_tensor(*parts, shape, is_coalesced=tensor.is_coalesced())


def resized_lengths(lengths: Sequence[int], number: int) -> list[int]:
    """Lengths of another number of sequences: more have the mean length, fewer share it evenly."""
    mean = -(-sum(lengths) // max(len(lengths), 1))
    if number >= len(lengths):
        return [*lengths, *[mean] * (number - len(lengths))]
    total = max(sum(lengths) - (len(lengths) - number) * mean, number)
    return [total // number + (sample < total % number) for sample in range(number)]


def torch_version() -> tuple[int, int]:
    """PyTorch's version, such as (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
