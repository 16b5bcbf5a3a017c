"""Detects whether a batch has changed the Python objects that a step can read."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, Generic
from weakref import ref

import torch

from memcallback.core.by_class import by_class
from memcallback.core.code_lines import is_library
from memcallback.core.tensors import attributes
from memcallback.core.torch_private import FakeTensor, no_dispatch
from memcallback.step.copies.functions import cell_contents, hooks_of, outer_variables
from memcallback.step.copies.known import values_of
from memcallback.step.hooks import Hook

#: Values that are compared as they are.
_VALUES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    CodeType,
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
    ref,
)
#: Classes of C that hold nothing but what is looked into here.
_PLAIN = {
    object,
    dict,
    OrderedDict,
    defaultdict,
    list,
    tuple,
    set,
    frozenset,
    deque,
    SimpleNamespace,
    Generic,
    BaseException,
    Exception,
}
#: Attributes of every fake tensor, besides its user's.
_OF_FAKES = {
    "_memcallback_values",
    "_fake_device",
    "constant",
    "dispatch_keys",
    "fake_mode",
    "pytype",
    "real_tensor",
}
_CONTAINERS = (list, tuple, set, frozenset, deque)
#: Objects at most. Past them the state counts as unknown, and comparing would take too long.
_MAX_OBJECTS = 200_000
_MAX_ARRAY_BYTES = 1_000_000


def python_state(roots: Iterable[object], *, has_values: bool = False) -> list[object] | None:
    """All that can be reached from some objects, as values and structure; None if it is unknown.

    Two equal states mean that the same code would do the same. Values of tensors and PyTorch's
    random numbers are among it only with `has_values`, for programs that read them: others count
    batches (batch norm) and draw numbers (dropout) in vain.
    What cannot be looked into (an iterator, an object of an extension) makes the state unknown.
    """
    state: list[object] = [random.getstate()]
    if has_values:
        with no_dispatch():
            state.append(torch.default_generator.get_state().numpy().tobytes())
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state += [kind, keys.tobytes(), *rest]
    # Held, so that no later object gets the number of one that is gone.
    seen: dict[int, tuple[int, object]] = {}
    pending = [iter(list(roots))]
    while pending:
        value = next(pending[-1], _END)
        if value is _END:
            pending.pop()
            state.append(_END)
        elif isinstance(value, (*_VALUES, _Same)):
            state += [type(value), value]
        elif id(value) in seen:
            state.append(seen[id(value)][0])
        else:
            children = _children(value)
            if has_values and isinstance(value, FakeTensor):
                children = [*(children or ()), _bytes_of(value)]
            if children is None or len(seen) > _MAX_OBJECTS:
                return None
            seen[id(value)] = len(seen), value
            state.append(type(value))
            pending.append(iter(children))
    return state


_END = object()


def _children(value: Any) -> list[object] | None:
    """What an object holds; None if that cannot be known."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, Hook):  # of the trace itself
        return []
    if (numpy := sys.modules.get("numpy")) and isinstance(value, (numpy.ndarray, numpy.generic)):
        is_known = value.nbytes <= _MAX_ARRAY_BYTES and not value.dtype.hasobject
        return [value.dtype.str, *value.shape, value.tobytes()] if is_known else None
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type):
        return [*_of_class(value)]
    if isinstance(value, ModuleType):
        file = getattr(value, "__file__", None)
        return [*vars(value).values()] if _is_of_user(file) else []
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    kind: type = type(value)
    if _is_opaque(kind):
        return None
    own = [kind, *(entry for pair in attributes(value).items() for entry in pair)]
    if isinstance(value, dict):
        return [*own, *(entry for pair in value.items() for entry in pair)]
    if isinstance(value, _CONTAINERS):
        return [*own, len(value), *value]
    return own


def _of_function(function: FunctionType) -> list[object]:
    """What a function refers to; of a library's function without its global variables."""
    if _is_of_user(function.__code__.co_filename):
        return [*outer_variables(function), *vars(function).values(), function.__code__]
    return [*map(cell_contents, function.__closure__ or ()), *(function.__defaults__ or ())]


def _of_tensor(tensor: torch.Tensor) -> list[object]:
    grad = tensor.grad if tensor.is_leaf else None
    hooks = [hook for _, hook in hooks_of(tensor)] if tensor.is_leaf else []
    values = getattr(tensor, "constant", None)
    return [
        *(tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_leaf, grad, *hooks),
        # Of some fakes, such as an optimizer's count of steps, the values are known.
        None if values is None else _Same(values, values._version),
        *(part for item in vars(tensor).items() if item[0] not in _OF_FAKES for part in item),
    ]


def _bytes_of(tensor: torch.Tensor) -> bytes | None:
    """The values of a tensor, where they are known."""
    known = values_of(tensor)
    if known is None:
        return None
    with no_dispatch():
        return known.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes()


class _Same:
    """A tensor with values, equal to itself as long as they stay."""

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self._tensor, self._version = tensor, version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and self._tensor is other._tensor
            and self._version == other._version
        )

    __hash__ = None  # type: ignore[assignment]


def _of_class(kind: type) -> Iterator[object]:
    """The variables and methods of a class of the user's, and of those that it derives from."""
    for base in kind.__mro__:
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if _is_of_user(file):
            yield from vars(base).values()


def _is_of_user(file: str | None) -> bool:
    return file is not None and not is_library(file)


@by_class
def _is_opaque(kind: type) -> bool:
    """Whether objects of a class can hold what Python does not show."""
    of_c = (WrapperDescriptorType, MethodDescriptorType)
    return any(
        isinstance(member, of_c)
        for base in kind.__mro__
        if base not in _PLAIN
        for member in vars(base).values()
    )
