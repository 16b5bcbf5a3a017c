"""untouched_objects(): restores what the user's own objects, containers and closures hold."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from memcallback.core.by_class import by_class
from memcallback.core.code_lines import is_library
from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import walk
from memcallback.step.copies.functions import (
    MAX_ITEMS,
    WRITABLE,
    cell_contents,
    is_writable,
    outer_variables,
    restore_cell,
    restore_container,
)

#: What is in a container with more is data, and is not looked at.
_MAX_HELD = 1000
#: Objects that are looked at from one variable on.
_MAX_OBJECTS = 10_000
#: A trace makes copies of what modules and optimizers keep.
_NOT_OWN = (type, ModuleType, FunctionType, torch.nn.Module, torch.optim.Optimizer, torch.Tensor)


@contextmanager
def untouched_objects(roots: Iterable[object], spaces: Collection[int]) -> Iterator[None]:
    """Restore at the end what the values lead to: objects of the user's classes, and containers.

    And variables of closures. Counters, lists and kept tensors are then as they were. `spaces` are
    the ids of modules' namespaces, which stay as they are. No code of the user's runs. For a
    process without other threads.
    """
    seen: dict[int, object] = {}
    containers: list[tuple[Any, Any]] = []
    cells: list[tuple[CellType, object]] = []
    for root in roots:
        if not _leads_on(root):
            continue
        value: Any
        for value in islice(walk([root], _held, seen), _MAX_OBJECTS):
            if type(value) is FunctionType:
                cells += [(cell, cell_contents(cell)) for cell in value.__closure__ or ()]
            if is_writable(value) and id(value) not in spaces and len(value) <= MAX_ITEMS:
                containers.append((value, copy.copy(value)))
    try:
        yield
    finally:
        for cell, contents in cells:
            restore_cell(cell, contents)
        for container, before in containers:
            restore_container(container, before)


def _held(value: Any) -> list[Any]:
    """What leads to others, of what a value holds."""
    kind = type(value)
    held: Iterable[Any]
    if (own := _own_attributes(value)) is not None:
        held = [own]
    elif is_writable(value) or issubclass(kind, tuple):
        held = () if len(value) > _MAX_HELD else _items(value)
    elif issubclass(kind, type):
        # Its methods lead to what is among the global variables itself.
        attributes = type.__getattribute__(value, "__dict__").values()
        held = [item for item in attributes if type(item) is not FunctionType]
    elif kind is FunctionType:
        is_own = not is_library(value.__code__.co_filename)
        held = [vars(value), *(outer_variables(value) if is_own else _closed(value))]
    elif kind is MethodType:
        held = [value.__self__, value.__func__]
    else:
        held = [value.func, *value.args, *value.keywords.values()]
    return [*filter(_leads_on, held)]


def _items(container: Any) -> Iterable[Any]:
    if issubclass(type(container), tuple):
        return tuple.__iter__(container)
    return [*container.values()] if isinstance(container, dict) else container


def _closed(function: FunctionType) -> list[object]:
    """What a function that a library made holds: the user's own, where it wraps that."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*map(cell_contents, function.__closure__ or ()), *defaults]


def _leads_on(value: object) -> bool:
    """Whether a value is restored, or may lead to one that is."""
    kind = type(value)
    if issubclass(kind, tuple):
        items: Any = value
        has_few = tuple.__len__(items) <= _MAX_HELD
        return has_few and any(_kind_leads_on(type(item)) for item in tuple.__iter__(items))
    if issubclass(kind, type):
        return _is_of_user(value)  # type: ignore[arg-type]  # it is a class
    return _kind_leads_on(kind)


@by_class
def _kind_leads_on(kind: type) -> bool:
    """Whether values of a class may lead to one that is restored."""
    lead = (FunctionType, MethodType, partial, *WRITABLE)  # `in` would ask a class for equality
    return any(kind is each for each in lead) or issubclass(kind, tuple) or _is_own_class(kind)


def _own_attributes(value: object) -> dict[str, Any] | None:
    """The `__dict__` of an object of the user's own classes; None for any other."""
    own: object = None
    if _is_own_class(type(value)):
        with PassOver():  # there is none, or a class has something else there
            own = object.__getattribute__(value, "__dict__")
    return own if type(own) is dict else None


@by_class
def _is_own_class(kind: type) -> bool:
    """Whether a class with attributes is of the user's files; so is a `SimpleNamespace`."""
    if issubclass(kind, _NOT_OWN) or not type.__getattribute__(kind, "__dictoffset__"):
        return False
    return kind is SimpleNamespace or _is_of_user(kind)


@by_class
def _is_of_user(kind: type) -> bool:
    """Whether a class is of the user's files, of a notebook, or of a module that is in no list."""
    with PassOver():  # a class may have anything as its module
        name = type.__getattribute__(kind, "__module__")
        module = sys.modules.get(name)
        file = None if module is None else vars(module).get("__file__")
        if file is not None:
            return not is_library(file)
        return name.partition(".")[0] not in sys.stdlib_module_names
    return False
