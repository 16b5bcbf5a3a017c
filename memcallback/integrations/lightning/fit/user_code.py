"""The variables of the user's own modules and classes, which a trial may change."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from memcallback.core.code_lines import is_library

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]


def users_modules(kinds: Iterable[type]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield file name and variables of the user's modules that a training with such classes is of.

    Those are `__main__`, the modules of the classes, what they import, also in functions, and what
    lies in the same folders: another program in this process, such as other tests, is left alone.
    """
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if issubclass(type(module), ModuleType) and _is_users(module)
    }
    pending = {"__main__"} | {part.__module__ for kind in kinds for part in kind.__mro__}
    found: set[str] = set()
    while pending := (pending & modules.keys()) - found:
        found |= pending
        folders = {_folder_of(modules[name]) for name in pending} - {""}
        pending = {name for module in map(modules.get, pending) for name in _imported(module)}
        pending |= {name for name, module in modules.items() if _folder_of(module) in folders}
    for name, module in modules.items():
        if name in found:
            variables = vars(module)
            yield str(variables.get("__file__") or name).rpartition("/")[2], variables


def _folder_of(module: Any) -> str:
    """The folder of a module's file, with a separator at its end; empty without a file."""
    folder, separator, _ = str(vars(module).get("__file__") or "").rpartition("/")
    return folder + separator


def _imported(module: Any) -> Iterator[str]:
    """The names of the modules that a module imports, also in its functions."""
    package = vars(module).get("__package__") or ""
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, (type, FunctionType)):
            yield value.__module__
            if value.__module__ == module.__name__:
                members = vars(value).values() if isinstance(value, type) else [value]
                for function in map(_function_of, list(members)):
                    if function is not None:
                        yield from _imported_by(function.__code__, package)


def _function_of(member: Any) -> FunctionType | None:
    """The function inside of a member of a class or module, without its decorators."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, cached_property):
        member = member.func
    if isinstance(member, (FunctionType, classmethod, staticmethod)):
        with suppress(ValueError):  # it wraps itself
            member = inspect.unwrap(cast(Any, member))
    return member if isinstance(member, FunctionType) else None


def _imported_by(code: CodeType, package: str) -> Iterator[str]:
    """What a function and those inside of it import; some are names in modules instead."""
    # To disassemble takes long, and most functions import nothing.
    imports = _IMPORT_NAME in code.co_code[::2]
    instructions = [
        instruction
        for instruction in (dis.get_instructions(code) if imports else ())
        if instruction.opname != "EXTENDED_ARG"  # a part of the next one
    ]
    for position, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            level, names = (each.argval for each in instructions[position - 2 : position])
            with suppress(ImportError):  # of a package that is none
                base = resolve_name("." * level + instruction.argval, package)
                yield base
                yield from (f"{base}.{name}" for name in names or ())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imported_by(constant, package)


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
