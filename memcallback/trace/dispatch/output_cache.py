"""Cache of fake kernel results by input shapes.

PyTorch's own cache of fake operators (torch/_subclasses/fake_tensor.py) does the same for more
kinds of arguments, and takes most of a trace's time. Here only what a training step has most of is
remembered: strided tensors of real numbers, and plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")
_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
#: Operators with one of these tags give what depends on values, or change the shape of what they
#: are given.
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
#: The memo is emptied when it has so many entries.
_MANY = 100_000


class _Unknown(Exception):
    """An argument or a result of a kind that is not remembered."""


@dataclass(frozen=True)
class _Made:
    """A tensor that an operator gives: an argument itself, a view of one, or a new one.

    Attributes:
        argument: The position of the argument that it is or that it views; None for a new one.
        layout: Its shape, strides, storage offset and dtype; None for the argument itself.
    """

    argument: int | None
    layout: tuple[torch.Size, tuple[int, ...], int, torch.dtype] | None


class OutputCache:
    """Remembers what operators give."""

    def __init__(self) -> None:
        self._entries: dict[tuple[object, ...], tuple[type | None, tuple[_Made | None, ...]]] = {}
        self._is_known: dict[Any, bool] = {}

    def ask(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], list[FakeTensor]] | None:
        """What to look up, and the tensors among the arguments; None if nothing is remembered of
        such a call.
        """
        is_known = self._is_known.get(func)
        if is_known is None:
            is_known = self._is_known[func] = not any(tag in func.tags for tag in _TAGS)
        if not is_known:
            return None
        tensors: list[FakeTensor] = []
        key: list[object] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        try:
            key += [_key_of(value, tensors) for value in args]
            key += [(name, _key_of(value, tensors)) for name, value in kwargs.items()]
        except _Unknown:
            return None
        return tuple(key), tensors

    def recall(
        self, mode: FakeTensorMode, key: tuple[object, ...], tensors: list[FakeTensor]
    ) -> tuple[object] | None:
        """What the call gives, in a tuple of one; None if it is not remembered."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        kind, made = entry
        outputs = [None if one is None else _make(mode, one, tensors) for one in made]
        if kind is None:
            return (outputs[0] if outputs else None,)
        return (kind(outputs),)

    def remember(self, key: tuple[object, ...], tensors: list[FakeTensor], outputs: object) -> None:
        """Remember what the call gave, if it can be made anew."""
        if outputs is None:
            kind, found = None, []
        elif isinstance(outputs, torch.Tensor):
            kind, found = None, [outputs]
        elif type(outputs) in (tuple, list):
            kind, found = type(outputs), list(outputs)  # type: ignore[call-overload]
        else:
            return
        storages = {
            tensor.untyped_storage()._cdata: position
            for position, tensor in reversed(list(enumerate(tensors)))
        }
        positions = {
            id(tensor): position for position, tensor in reversed(list(enumerate(tensors)))
        }
        fresh: set[int] = set()
        made: list[_Made | None] = []
        for output in found:
            if output is None:
                made.append(None)
                continue
            one = _made(output, positions, storages, fresh)
            if one is None:
                return
            made.append(one)
        if len(self._entries) >= _MANY:
            self._entries.clear()
        self._entries[key] = kind, tuple(made)


def _key_of(value: object, tensors: list[FakeTensor]) -> object:
    kind = type(value)
    if kind is FakeTensor:
        assert isinstance(value, FakeTensor)
        if not _is_ordinary(value):
            raise _Unknown
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if kind in _PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        return kind, tuple([_key_of(one, tensors) for one in value])  # type: ignore[attr-defined]
    raise _Unknown


def _is_ordinary(tensor: FakeTensor) -> bool:
    """Whether a tensor is all in its shape, strides and dtype: it has no known value, and is not
    read through a conjugation or as zeros.
    """
    is_marked = tensor.is_complex() or tensor.is_neg() or torch._is_zerotensor(tensor)
    return tensor.constant is None and tensor.layout is torch.strided and not is_marked


def _made(
    output: object, positions: Mapping[int, int], storages: Mapping[int, int], fresh: set[int]
) -> _Made | None:
    """How an output can be made anew; None if it cannot."""
    if id(output) in positions:
        return _Made(positions[id(output)], None)
    if (
        type(output) is not FakeTensor
        or not _is_ordinary(output)
        or output.requires_grad
        or output.fake_device != _CPU
    ):
        return None
    layout = (output.shape, output.stride(), int(output.storage_offset()), output.dtype)
    storage = output.untyped_storage()
    if storage._cdata in storages:
        return _Made(storages[storage._cdata], layout)
    # A new one that shares its storage, or leaves a part of it unused, is not made anew.
    is_whole = (
        storage.nbytes() == _num_elements(output) * output.element_size()
        and not output.storage_offset()
    )
    if storage._cdata in fresh or not is_whole:
        return None
    fresh.add(storage._cdata)
    return _Made(None, layout)


def _num_elements(tensor: torch.Tensor) -> int:
    """How many elements the storage of a tensor needs that begins at its start."""
    if not tensor.numel():
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _make(mode: FakeTensorMode, made: _Made, tensors: list[FakeTensor]) -> torch.Tensor:
    if made.layout is None:
        assert made.argument is not None
        return tensors[made.argument]
    shape, stride, offset, dtype = made.layout
    if made.argument is None:
        plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    else:
        plain = torch.empty(0, dtype=dtype, device="meta")
        plain.set_(tensors[made.argument].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, plain, _CPU)
