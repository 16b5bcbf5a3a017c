"""untouched_program(): restores the values of a program's global variables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from memcallback.core.code_lines import is_framework, is_library
from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import namespace_of
from memcallback.step.copies.own_objects import (
    LRU_CACHE,
    emptied_if_grown,
    holds_fakes,
    module_of,
    untouched_objects,
)

#: A dictionary of a library with more in it is a table rather than a cache.
_MAX_CACHED = 1000
_ABSENT = object()
_Restore = Callable[[], object]


@contextmanager
def untouched_program(functions: Iterable[object] = ()) -> Iterator[None]:
    """Restore the program's variables and objects at the end, as far as they are the user's own.

    Global variables, class attributes and caches of the user's files, and what these variables and
    some functions lead to (`untouched_objects`). Of libraries only fake tensors are taken out of
    caches in global variables. So each attempt to trace a step finds the caches and counters that
    the training will find, and no fakes of another one. For a process without other threads, which
    may be changing the same variables.
    """
    # Namespaces are restored by name: whoever empties one of them takes Python's own names away.
    spaces = {
        id(vars(module)) for module in list(sys.modules.values()) if type(module) is ModuleType
    } | {id(sys.modules)}
    known, modules = set(sys.modules), _with_files(sys.modules)
    own = [module for module, file in modules if not is_library(file)]
    main = sys.modules.get("__main__")
    if type(main) is ModuleType and "__file__" not in vars(main):  # a notebook, `python -c`
        own.append(main)
    restores = [restore for module in own for restore in _of_namespace(module)]
    # Of PyTorch, Lightning and Python itself nothing is restored.
    seen = set(spaces)
    restores += [
        restore
        for module, file in modules
        if is_library(file) and not is_framework(file)
        for restore in _of_caches(module, seen)
    ]
    values = [value for module in own for value in vars(module).values()]
    variables = {id(vars(module)) for module in own}
    try:
        with untouched_objects([*functions, *values], spaces, variables):
            yield
    finally:
        # What they have registered as they were imported is put back as well.
        for module, file in _with_files(set(sys.modules) - known):
            if module.__name__ not in known and not is_library(file):
                sys.modules.pop(module.__name__, None)
        for restore in restores:
            with PassOver():
                restore()


def own_modules() -> list[ModuleType]:
    """The modules of the user's program, not those of installed packages."""
    return [module for module, file in _with_files(sys.modules) if not is_library(file)]


def _with_files(names: Iterable[str]) -> list[tuple[ModuleType, str]]:
    """The modules of these names that come from a file, with its path."""
    modules = [sys.modules.get(name) for name in list(names)]
    return [
        (module, file)
        for module in modules
        if type(module) is ModuleType and isinstance(file := vars(module).get("__file__"), str)
    ]


def _of_caches(module: ModuleType, seen: set[int]) -> Iterator[_Restore]:
    """Take fake tensors out of a module's own dictionaries and caches.

    Other entries stay: what they stand for, such as an operator that is registered, stays too.
    """
    for value in vars(module).values():
        if type(value) is LRU_CACHE:
            yield emptied_if_grown(value, is_own=False)
        elif type(value) is dict and len(value) <= _MAX_CACHED and id(value) not in seen:
            seen.add(id(value))
            yield _of_growth(value)


def _of_growth(cache: dict[Any, Any]) -> _Restore:
    before = cache.copy()

    def restore() -> None:
        for key, value in list(cache.items()):
            if before.get(key, _ABSENT) is not value and holds_fakes(value):
                if key in before:
                    cache[key] = before[key]
                else:
                    del cache[key]

    return restore


def _of_namespace(owner: ModuleType | type) -> Iterator[_Restore]:
    """Restore the variables of a module or class, and those of its own classes."""
    before = dict(_names_in(owner))
    yield lambda: _restore_names(owner, before)
    for value in before.values():
        if issubclass(type(value), type) and module_of(value) == _name_of(owner):
            yield from _of_namespace(value)


def _names_in(owner: ModuleType | type) -> Mapping[str, Any]:
    return vars(owner) if isinstance(owner, ModuleType) else namespace_of(owner)


def _name_of(owner: ModuleType | type) -> str | None:
    # A class inside of a class is restored with the module alone.
    return owner.__name__ if isinstance(owner, ModuleType) else None


def _restore_names(owner: ModuleType | type, before: dict[str, Any]) -> None:
    now = _names_in(owner)
    for name in [name for name in now if name not in before]:
        with PassOver():  # attributes that a class guards
            delattr(owner, name)
    for name, value in before.items():
        if now.get(name) is not value:
            with PassOver():
                setattr(owner, name, value)
