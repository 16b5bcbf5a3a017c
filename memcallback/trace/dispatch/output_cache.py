"""A cache of fake kernel results by input shapes.

PyTorch's own cache (torch/_subclasses/fake_tensor.py) takes more kinds of arguments, and most of a
trace's time. This one takes only what a training step has most of: strided tensors of real
numbers, and plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memcallback.core.torch_private import FakeTensor, FakeTensorMode, is_zero_tensor, storage_id
from memcallback.cuda.op_call import OpCall

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
#: Tags of operators whose result depends on values, or that change the shape of an argument.
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
#: Operators with a result that does not fill its storage.
_PARTIAL = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in (
        "bartlett_window",
        "blackman_window",
        "hamming_window",
        "hann_window",
        "kaiser_window",
    )
    for overload in getattr(torch.ops.aten, name).overloads()
)
#: The cache is emptied when it has this many entries.
_MAX_ENTRIES = 100_000


class _NotCacheable(Exception):
    """An argument of a kind that the cache does not take."""


@dataclass(frozen=True)
class _Recipe:
    """How to make an output again: an argument itself, a view of one, or a new tensor.

    Attributes:
        argument: The position of the argument that is returned or viewed; None for a new tensor.
        layout: Shape, strides, storage offset and dtype; None for the argument itself.
    """

    argument: int | None
    layout: tuple[torch.Size, tuple[int, ...], int, torch.dtype] | None


class OutputCache:
    """Caches the results of fake kernels."""

    def __init__(self) -> None:
        self._entries: dict[tuple[object, ...], tuple[type | None, tuple[_Recipe | None, ...]]] = {}
        self._is_known: dict[Any, bool] = {}

    def result(self, mode: FakeTensorMode, call: OpCall, run: Callable[[], Any]) -> Any:
        """The result of a call: the cached one, else what `run` returns with the fake kernel."""
        asked = self._ask(call)
        if asked is not None and (recalled := self._recall(mode, *asked)) is not None:
            return recalled[0]
        # PyTorch's cache forgets the unused part of a storage (windows of a spectrum).
        was_enabled = mode.cache_enabled
        mode.cache_enabled = was_enabled and call.op not in _PARTIAL
        try:
            result = run()
        finally:
            mode.cache_enabled = was_enabled
        if asked is not None:
            self._remember(*asked, result)
        return result

    def _ask(self, call: OpCall) -> tuple[tuple[object, ...], list[FakeTensor]] | None:
        """The key of a call and its tensors; None for a call that is not cached."""
        func = call.op
        is_known = self._is_known.get(func)
        if is_known is None:
            is_known = self._is_known[func] = not any(tag in func.tags for tag in _TAGS)
        if not is_known:
            return None
        tensors: list[FakeTensor] = []
        key: list[object] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        try:
            key += [_key_of(value, tensors) for value in call.args]
            key += [(name, _key_of(value, tensors)) for name, value in call.kwargs.items()]
        except _NotCacheable:
            return None
        return tuple(key), tensors

    def _recall(
        self, mode: FakeTensorMode, key: tuple[object, ...], tensors: list[FakeTensor]
    ) -> tuple[object] | None:
        """The cached result in a tuple of one; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        kind, recipes = entry
        outputs = [None if recipe is None else _make(mode, recipe, tensors) for recipe in recipes]
        if kind is None:
            return (outputs[0] if outputs else None,)
        return (kind(outputs),)

    def _remember(
        self, key: tuple[object, ...], tensors: list[FakeTensor], outputs: object
    ) -> None:
        """Cache the result of a call, if it can be made again."""
        if outputs is None:
            kind, results = None, []
        elif isinstance(outputs, torch.Tensor):
            kind, results = None, [outputs]
        elif type(outputs) in (tuple, list):
            kind, results = type(outputs), list(outputs)  # type: ignore[call-overload]
        else:
            return
        storages = {
            storage_id(tensor.untyped_storage()): position
            for position, tensor in reversed(list(enumerate(tensors)))
        }
        positions = {
            id(tensor): position for position, tensor in reversed(list(enumerate(tensors)))
        }
        fresh: set[int] = set()
        recipes: list[_Recipe | None] = []
        for output in results:
            recipe = None if output is None else _recipe(output, positions, storages, fresh)
            if recipe is None and output is not None:
                return
            recipes.append(recipe)
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.clear()
        self._entries[key] = kind, tuple(recipes)


def _key_of(value: object, tensors: list[FakeTensor]) -> object:
    kind = type(value)
    if kind is FakeTensor:
        assert isinstance(value, FakeTensor)
        if not _is_ordinary(value):
            raise _NotCacheable
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if kind in _PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        return kind, tuple([_key_of(item, tensors) for item in value])  # type: ignore[attr-defined]
    raise _NotCacheable


def _is_ordinary(tensor: FakeTensor) -> bool:
    """Whether shape, strides and dtype describe a tensor: no known value, no conjugation."""
    is_marked = tensor.is_complex() or tensor.is_neg() or is_zero_tensor(tensor)
    return tensor.constant is None and tensor.layout is torch.strided and not is_marked


def _recipe(
    output: object, positions: Mapping[int, int], storages: Mapping[int, int], fresh: set[int]
) -> _Recipe | None:
    """How to make an output again; None if it cannot be."""
    if id(output) in positions:
        return _Recipe(positions[id(output)], None)
    if (
        type(output) is not FakeTensor
        or not _is_ordinary(output)
        or output.requires_grad
        or output.fake_device != _CPU
    ):
        return None
    layout = (output.shape, output.stride(), int(output.storage_offset()), output.dtype)
    storage = output.untyped_storage()
    if storage_id(storage) in storages:
        return _Recipe(storages[storage_id(storage)], layout)
    # A new tensor that shares its storage, or leaves a part of it unused, is not cached.
    is_whole = (
        storage.nbytes() == _num_elements(output) * output.element_size()
        and not output.storage_offset()
    )
    if storage_id(storage) in fresh or not is_whole:
        return None
    fresh.add(storage_id(storage))
    return _Recipe(None, layout)


def _num_elements(tensor: torch.Tensor) -> int:
    """The elements of a storage that a tensor at its start needs."""
    if not tensor.numel():
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _make(mode: FakeTensorMode, recipe: _Recipe, tensors: list[FakeTensor]) -> torch.Tensor:
    if recipe.layout is None:
        assert recipe.argument is not None
        return tensors[recipe.argument]
    shape, stride, offset, dtype = recipe.layout
    if recipe.argument is None:
        plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    else:
        plain = torch.empty(0, dtype=dtype, device="meta")
        plain.set_(tensors[recipe.argument].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, plain, _CPU)
