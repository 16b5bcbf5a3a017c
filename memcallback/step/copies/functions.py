"""Copy hooks and closures that refer to the copied model."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from memcallback.core.tensors import walk

_CONTAINERS = (list, tuple, set, frozenset, deque)
#: Those that are given back as they were.
_WRITTEN = (list, dict, set, deque, OrderedDict, defaultdict)


def hooks_of(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """The hooks of a leaf: for each the name of the method that registers it, and the function."""
    return [
        (method, hook)
        for method, hooks in (
            ("register_hook", tensor._backward_hooks),
            ("register_post_accumulate_grad_hook", tensor._post_accumulate_grad_hooks),
        )
        for hook in (hooks or {}).values()
    ]


class FunctionCopies:
    """Makes copies of the functions that hold a part of some modules in a closure, a default or a
    global variable.

    `copy.deepcopy` shares functions with the original, and so a hook that knows its module by such
    a variable would go on working with the original's. The copies know the copied parts instead,
    and share all else.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._parts = {id(part) for module in modules for part in (module, *_tensors(module))}
        self._functions = [function for function in functions_of(modules) if self._holds(function)]
        self._copies: list[FunctionType] = []

    def begin(self, memo: dict[int, Any]) -> None:
        """Put copies that hold nothing yet into the memo of `copy.deepcopy`."""
        cells: dict[int, CellType] = {}
        self._copies = [self._empty(function, cells) for function in self._functions]
        memo.update(
            (id(function), made)
            for function, made in zip(self._functions, self._copies, strict=True)
        )

    def complete(self, memo: dict[int, Any]) -> None:
        """Let them hold what was copied since."""
        for function, made in zip(self._functions, self._copies, strict=True):
            for own, cell in zip(function.__closure__ or (), made.__closure__ or (), strict=True):
                if cell is not own:
                    cell.cell_contents = copy.deepcopy(own.cell_contents, memo)
            for name in ("__defaults__", "__kwdefaults__"):
                if self._holds(getattr(function, name)):
                    setattr(made, name, copy.deepcopy(getattr(function, name), memo))
            for name in _global_names(function):
                if self._holds(function.__globals__[name]):
                    made.__globals__[name] = copy.deepcopy(function.__globals__[name], memo)

    def _empty(self, function: FunctionType, cells: dict[int, CellType]) -> FunctionType:
        closure = tuple(
            cells.setdefault(id(cell), CellType()) if self._holds(_contents(cell)) else cell
            for cell in function.__closure__ or ()
        )
        is_global = any(self._holds(function.__globals__[name]) for name in _global_names(function))
        variables = dict(function.__globals__) if is_global else function.__globals__
        made = FunctionType(
            function.__code__, variables, function.__name__, function.__defaults__, closure
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        return made

    def _holds(self, value: object) -> bool:
        return any(id(one) in self._parts for one in walk([value], _children))


@contextmanager
def untouched_variables(model: nn.Module, functions: Iterable[object]) -> Iterator[None]:
    """Give back what functions write to, as it was: variables of closures, and lists, dicts and
    sets that they know by a variable.
    """
    found = functions_of(model.modules(), functions)
    cells = {id(cell): cell for function in found for cell in function.__closure__ or ()}
    contents = {key: _contents(cell) for key, cell in cells.items()}
    containers = {
        id(value): (value, copy.copy(value))
        for function in found
        for value in _variables(function)
        if type(value) in _WRITTEN and value is not function.__globals__
    }
    try:
        yield
    finally:
        for key, cell in cells.items():
            if contents[key] is not _EMPTY:
                cell.cell_contents = contents[key]
        for container, before in containers.values():
            # Only those that were written to: others are read meanwhile by other threads.
            if not _is_same(container, before):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(
                    before
                )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict) and not _is_same([*one.values()], [*other.values()]):
        return False
    return all(map(is_, one, other))


def functions_of(modules: Iterable[nn.Module], others: Iterable[object] = ()) -> list[FunctionType]:
    """The functions in attributes and hooks of modules and in the hooks of their parameters,
    others, and those that these know, each once.
    """
    values = list(others)
    for module in modules:
        values += [
            *vars(module).values(),
            *(hook for tensor in _tensors(module) for _, hook in hooks_of(tensor)),
        ]
    return [value for value in walk(values, _children) if isinstance(value, FunctionType)]


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _children(value: object) -> list[Any] | None:
    """What a function, a container, an optimizer or a module holds; nothing of other objects, which
    may lead anywhere.
    """
    if isinstance(value, FunctionType):
        return _variables(value)
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, _CONTAINERS):
        return list(value)
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return [*value.modules()] if isinstance(value, nn.Module) else None


def _variables(function: FunctionType) -> list[Any]:
    """The values of the variables that a function has from elsewhere; of its functions those that
    are defined in the same place.
    """
    values = [
        *map(_contents, function.__closure__ or ()),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    for name in _global_names(function):
        value = function.__globals__[name]
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            values.append(value)
    return values


def _global_names(function: FunctionType) -> list[str]:
    return [name for name in _names(function.__code__) if name in function.__globals__]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_EMPTY = object()


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
