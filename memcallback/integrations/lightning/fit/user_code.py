"""The variables of the user's own modules and classes, which a trial may change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from memcallback.core.code_lines import is_library


def users_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield file name and variables of each imported module of the user's, and of `__main__`."""
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and _is_users(module):
            variables = vars(module)
            yield str(variables.get("__file__") or name).rpartition("/")[2], variables


def is_users_function(function: FunctionType) -> bool:
    """Whether a function was written in a file, or a notebook, of the user's."""
    return not is_library(function.__code__.co_filename)


def is_users_class(kind: type) -> bool:
    """Whether a class was written in a file, or a notebook, of the user's."""
    module = sys.modules.get(kind.__module__)
    if issubclass(type(module), ModuleType):
        return _is_users(module)
    return any(
        isinstance(value, FunctionType) and is_users_function(value)
        for value in vars(kind).values()
    )


def _is_users(module: Any) -> bool:
    # Read past a module's own __getattr__, which may import.
    file = vars(module).get("__file__")
    if file is None:  # a notebook, typed code; else built into Python, or a folder without code
        return module is sys.modules.get("__main__")
    return isinstance(file, str) and not is_library(file)
