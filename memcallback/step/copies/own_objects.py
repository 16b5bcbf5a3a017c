"""untouched_objects(): takes the tensors of a trace out of what the user's own objects keep."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from memcallback.core.by_class import by_class
from memcallback.core.code_lines import is_library
from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import walk
from memcallback.core.torch_private import FakeTensor
from memcallback.step.copies.functions import (
    MAX_ITEMS,
    WRITABLE,
    cell_contents,
    is_same,
    outer_variables,
)

#: A container with more in it holds data, and no objects that keep what a step makes.
_MAX_HELD = 100
_MAX_OBJECTS = 20_000
#: A trace makes copies of what modules and optimizers keep.
_NOT_OWN = (type, ModuleType, FunctionType, torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
#: A container and a copy of it.
_Pair = tuple[Any, Any]


@contextmanager
def untouched_objects(functions: Iterable[object], values: Iterable[object]) -> Iterator[None]:
    """Restore the objects of the user's classes that keep fake tensors at the end, whole.

    Those that functions and values lead to, and attributes of the functions. Others stay as the
    program has left them: what it does once, and notes in an object, is not done again. No code of
    the user's runs. For a process without other threads.
    """
    functions = list(functions)
    copies: dict[int, _Pair] = {}
    namespaces = [vars(function) for function in functions if type(function) is FunctionType]
    # What a global function refers to is among the global variables itself.
    held = [value for value in values if type(value) is not FunctionType]
    known = [[*_copied(own, copies)] for own in (*namespaces, *_objects([*functions, *held]))]
    try:
        yield
    finally:
        # Objects can share containers, so each is compared once.
        changed = {number for number, pair in copies.items() if not is_same(*pair)}
        for pairs in known:
            with PassOver():  # an object that cannot be read stays as it is
                _restore_if_fake([pair for pair in pairs if id(pair[0]) in changed])


def _copied(own: dict[str, Any], copies: dict[int, _Pair]) -> Iterator[_Pair]:
    """An object's attributes and the containers in them, with a copy of each."""
    pending: list[Any] = [own]
    seen: set[int] = set()
    while pending:
        container = pending.pop()
        if id(container) in seen or len(container) > MAX_ITEMS:
            continue
        seen.add(id(container))
        if id(container) not in copies:
            copies[id(container)] = container, copy.copy(container)
        yield copies[id(container)]
        if container is own or len(container) <= _MAX_HELD:
            pending += [item for item in _items(container) if _is_container(type(item))]


def _restore_if_fake(changed: list[_Pair]) -> None:
    """Put containers back if a fake tensor is among what is new in one of them."""
    new = []
    for container, before in changed:
        known = set(map(id, _items(before)))
        new += [item for item in _items(container) if id(item) not in known]
    found = islice(walk(new, _inside), MAX_ITEMS)
    if not any(issubclass(type(value), FakeTensor) for value in found):
        return
    for container, before in changed:
        if isinstance(container, dict):
            for name in [name for name in container.copy() if name not in before]:
                container.pop(name, None)
            container.update(before)
        else:
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(before)


def _items(container: Any) -> list[Any]:
    return list(container.copy().values() if isinstance(container, dict) else container)


def _objects(roots: Iterable[object]) -> Iterator[dict[str, Any]]:
    """The attributes of the user's own objects among some values and what they hold."""
    found = walk(filter(_leads_on, roots), _held)
    for value in islice(found, _MAX_OBJECTS):
        own = _own_attributes(value)
        if own is not None:
            yield own


def _held(value: object) -> list[Any] | None:
    """What leads to objects, and is held by an object, a function or a small container."""
    kind = type(value)
    own = _own_attributes(value)
    if own is not None:
        held = [*islice(own.values(), _MAX_HELD)]
    elif _is_container(kind) or kind is tuple:
        items: Any = value
        held = [] if len(items) > _MAX_HELD else _items(items)
    else:
        held = _of_function(value) or []
    return [*filter(_leads_on, held)]


def _leads_on(value: object) -> bool:
    return _kind_leads_on(type(value))


@by_class
def _kind_leads_on(kind: type) -> bool:
    """Whether objects of a class can hold others that are looked for."""
    is_function = any(kind is each for each in (FunctionType, MethodType, partial))
    return is_function or kind is tuple or _is_container(kind) or _is_own_class(kind)


@by_class
def _is_container(kind: type) -> bool:
    # `in` would ask a class whether it is equal.
    return any(kind is each for each in WRITABLE)


def _of_function(value: Any) -> list[Any] | None:
    """What a function, a method or a partial refers to; None for anything else."""
    kind = type(value)
    if kind is FunctionType:
        return [*vars(value).values(), *outer_variables(value)]
    if kind is MethodType:
        return [value.__self__, value.__func__]
    return [value.func, *value.args, *value.keywords.values()] if kind is partial else None


def _inside(value: object) -> list[Any] | None:
    """What a new value holds, of whatever class; None for a leaf."""
    kind: type = type(value)
    if _is_container(kind) or kind is tuple:
        return _items(value)
    if issubclass(kind, (type, ModuleType, torch.Tensor)):
        return None
    if kind is FunctionType:
        return [*map(cell_contents, value.__closure__ or ())]  # type: ignore[attr-defined]
    held = _of_function(value)
    if held is None and (own := _attributes(value)) is not None:
        held = list(own.copy().values())
    return held


def _own_attributes(value: object) -> dict[str, Any] | None:
    """The `__dict__` of an object of the user's own classes; None for any other."""
    return _attributes(value) if _is_own_class(type(value)) else None


def _attributes(value: object) -> dict[str, Any] | None:
    own: object = None
    with PassOver():  # there is none, or a class has something else there
        own = object.__getattribute__(value, "__dict__")
    return own if type(own) is dict else None


@by_class
def _is_own_class(kind: type) -> bool:
    """Whether a class with attributes is of the user's files; so is a `SimpleNamespace`."""
    if issubclass(kind, _NOT_OWN) or not type.__getattribute__(kind, "__dictoffset__"):
        return False
    if kind is SimpleNamespace:
        return True
    with PassOver():  # a class may have anything as its module
        file = vars(sys.modules[type.__getattribute__(kind, "__module__")]).get("__file__")
        return file is None or not is_library(file)
    return False
