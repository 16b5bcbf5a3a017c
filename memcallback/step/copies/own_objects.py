"""untouched_objects(): restores what the user's own objects, containers and closures hold."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from types import (
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch

from memcallback.core.by_class import by_class
from memcallback.core.code_lines import is_library
from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import has_dict, namespace_of, own_dict, tensors_in, walk
from memcallback.core.torch_private import FakeTensor
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
#: Objects that are looked at from one variable on; after so many in all, fewer.
_MAX_OBJECTS, _MANY_OBJECTS, _MAX_OF_MANY = 2000, 20_000, 100
#: A trace makes copies of what modules and optimizers keep.
_NOT_OWN = (type, ModuleType, FunctionType, torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
LRU_CACHE: Any = type(lru_cache(len))
_FUNCTIONS = (FunctionType, MethodType, partial, LRU_CACHE, staticmethod, classmethod, property)
_LEAD = (*_FUNCTIONS, *WRITABLE)


@contextmanager
def untouched_objects(
    roots: Iterable[object], spaces: Collection[int], variables: Collection[int] = ()
) -> Iterator[None]:
    """Restore at the end what the values lead to: objects of the user's classes, and containers.

    And variables of closures, and caches. Counters, lists and kept tensors are then as they were.
    `spaces` are the ids of modules' namespaces, which stay as they are; the values of those among
    `variables` are roots. No code of the user's runs but that of keys and of objects that go. For a
    process without other threads.
    """
    seen: dict[int, object] = {}
    restores: list[Callable[[], object]] = []

    def held(value: object) -> list[Any]:
        with PassOver():  # classes can make anything fail
            return _held(value, variables)
        return []

    for root in roots:
        most = _MAX_OBJECTS if len(seen) < _MANY_OBJECTS else _MAX_OF_MANY
        for value in islice(walk(held((root,)), held, seen), most):
            if id(value) not in spaces:
                with PassOver():
                    restores += _restores_of(value)
    try:
        yield
    finally:
        for restore in restores:
            with PassOver():
                restore()


def _restores_of(value: Any) -> Iterator[Callable[[], object]]:
    """What restores a container, a cache, the variables of a closure, or an object."""
    kind = type(value)
    if is_writable(value):
        if len(value) <= MAX_ITEMS:
            yield partial(restore_container, value, copy.copy(value))
    elif kind is LRU_CACHE:
        name = vars(value).get("__module__")
        yield emptied_if_grown(value, is_own=isinstance(name, str) and _is_users_module(name))
    elif kind is FunctionType and not is_library(value.__code__.co_filename):
        for cell in value.__closure__ or ():
            yield partial(restore_cell, cell, cell_contents(cell))
    elif (own := _own_attributes(value)) is not None:
        yield partial(_give_attributes, value, own)


def emptied_if_grown(cache: Any, *, is_own: bool) -> Callable[[], object]:
    """What empties a cache of functools that has taken something in; a library's only of fakes.

    What it has taken in is in no list: it forgets all, and computes it again when asked.
    """
    misses_before = cache.cache_info().misses

    def restore() -> None:
        # Most have taken nothing in, and what is in some is large.
        if cache.cache_info().misses == misses_before:
            return
        if is_own or any(map(holds_fakes, gc.get_referents(cache))):
            cache.cache_clear()

    return restore


def holds_fakes(value: object) -> bool:
    """Whether a fake tensor is in a value."""
    return any(isinstance(tensor, FakeTensor) for tensor in tensors_in(value))


def _give_attributes(value: object, own: dict[str, Any]) -> None:
    """Give an object its own dictionary again, whose contents are restored as a container's."""
    if _own_attributes(value) is not own:
        object.__setattr__(value, "__dict__", own)


def _held(value: Any, variables: Collection[int]) -> list[Any]:
    """What leads to others, of what a value holds."""
    kind = type(value)
    held: list[Any] = []
    if (own := _own_attributes(value)) is not None:
        held = [own]
    if is_writable(value) or issubclass(kind, tuple):
        # A tuple of a class of the user's may say something else of its length.
        size = tuple.__len__(value) if issubclass(kind, tuple) else len(value)
        held += _items(value) if size <= _MAX_HELD else ()
    elif issubclass(kind, type):
        held = [*namespace_of(value).values(), *type.__dict__["__bases__"].__get__(value)]
    elif kind is FunctionType and is_library(value.__code__.co_filename):
        # What it keeps is the library's, but for a function or object of the user's inside.
        inner = [*vars(value).values(), *_closed(value)]
        held = [one for one in inner if not is_writable(one)]
    elif kind is FunctionType:
        is_known = id(value.__globals__) in variables
        held = [vars(value), *(_closed(value) if is_known else outer_variables(value))]
    elif kind is MethodType:
        held = [value.__self__, value.__func__]
    elif kind is partial:
        held = [value.func, *value.args, *value.keywords.values()]
    elif kind is LRU_CACHE:
        held = [vars(value).get("__wrapped__")]
    elif any(kind is each for each in (staticmethod, classmethod)):
        held = [value.__func__]
    elif kind is property:
        held = [value.fget]
    return [*filter(_leads_on, held)]


def _items(container: Any) -> list[Any]:
    if issubclass(type(container), tuple):
        return [*tuple.__iter__(container)]
    return [*dict.values(container)] if isinstance(container, dict) else [*container]


def _closed(function: FunctionType) -> list[object]:
    """What a function holds beside global variables."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*map(cell_contents, function.__closure__ or ()), *defaults]


def _leads_on(value: object) -> bool:
    """Whether a value is restored, or may lead to one that is."""
    kind = type(value)
    if issubclass(kind, tuple) and not _is_own_class(kind):
        items: Any = value
        has_few = tuple.__len__(items) <= _MAX_HELD
        return has_few and any(_kind_leads_on(type(item)) for item in tuple.__iter__(items))
    if issubclass(kind, type):
        return _is_of_user(value)  # type: ignore[arg-type]  # it is a class
    return _kind_leads_on(kind)


@by_class
def _kind_leads_on(kind: type) -> bool:
    """Whether values of a class may lead to one that is restored."""
    # `in` would ask a class whether it is equal.
    return any(kind is each for each in _LEAD) or issubclass(kind, tuple) or _is_own_class(kind)


def _own_attributes(value: object) -> dict[str, Any] | None:
    """The `__dict__` of an object of the user's own classes; None for any other."""
    return own_dict(value) if _is_own_class(type(value)) else None


@by_class
def _is_own_class(kind: type) -> bool:
    """Whether a class with attributes is of the user's files; so is a `SimpleNamespace`."""
    if issubclass(kind, _NOT_OWN) or not has_dict(kind):
        return False
    return kind is SimpleNamespace or _is_of_user(kind)


@by_class
def _is_of_user(kind: type) -> bool:
    """Whether a class is of the user's files, of a notebook, or of a module that is in no list."""
    name = module_of(kind)
    return isinstance(name, str) and _is_users_module(name)


def module_of(kind: type) -> object:
    """The name of a class's module; a class may have anything there."""
    return type.__dict__["__module__"].__get__(kind)


def _is_users_module(name: str) -> bool:
    module = sys.modules.get(name)
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    if isinstance(file, str):
        return not is_library(file)
    return name.partition(".")[0] not in sys.stdlib_module_names
