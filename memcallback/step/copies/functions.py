"""Copy functions that refer to a copied model by a closure, a default or a global variable."""

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
#: Containers whose contents are restored.
_WRITABLE = (list, dict, set, deque, OrderedDict, defaultdict)


def hooks_of(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """The hooks of a leaf tensor: the name of the registering method, and the function."""
    return [
        (method, hook)
        for method, hooks in (
            ("register_hook", tensor._backward_hooks),
            ("register_post_accumulate_grad_hook", tensor._post_accumulate_grad_hooks),
        )
        for hook in (hooks or {}).values()
    ]


class FunctionCopies:
    """Copies the functions that refer to parts of some modules, for use with `copy.deepcopy`.

    `copy.deepcopy` shares functions, so a copied hook would still work on the original module. The
    copies made here refer to the copied parts instead, and share everything else.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._parts = {id(part) for module in modules for part in (module, *_tensors(module))}
        self._functions = [function for function in functions_of(modules) if self._holds(function)]
        self._copies: list[FunctionType] = []

    def begin(self, memo: dict[int, Any]) -> None:
        """Put copies with empty closures into the memo of `copy.deepcopy`."""
        cells: dict[int, CellType] = {}
        self._copies = [self._empty(function, cells) for function in self._functions]
        memo.update(zip(map(id, self._functions), self._copies, strict=True))

    def complete(self, memo: dict[int, Any]) -> None:
        """Fill the copies with the parts that were copied since."""
        for function, copied in zip(self._functions, self._copies, strict=True):
            for own, cell in zip(function.__closure__ or (), copied.__closure__ or (), strict=True):
                if cell is not own:
                    cell.cell_contents = copy.deepcopy(own.cell_contents, memo)
            for name in ("__defaults__", "__kwdefaults__"):
                if self._holds(getattr(function, name)):
                    setattr(copied, name, copy.deepcopy(getattr(function, name), memo))
            for name in _global_names(function):
                if self._holds(function.__globals__[name]):
                    copied.__globals__[name] = copy.deepcopy(function.__globals__[name], memo)

    def _empty(self, function: FunctionType, cells: dict[int, CellType]) -> FunctionType:
        closure = tuple(
            cells.setdefault(id(cell), CellType()) if self._holds(cell_contents(cell)) else cell
            for cell in function.__closure__ or ()
        )
        is_global = any(self._holds(function.__globals__[name]) for name in _global_names(function))
        variables = dict(function.__globals__) if is_global else function.__globals__
        copied = FunctionType(
            function.__code__, variables, function.__name__, function.__defaults__, closure
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        return copied

    def _holds(self, value: object) -> bool:
        return any(id(reached) in self._parts for reached in walk([value], _children))


@contextmanager
def untouched_variables(model: nn.Module, functions: Iterable[object]) -> Iterator[None]:
    """Restore closure variables, and containers in variables, that functions write to."""
    all_functions = functions_of(model.modules(), functions)
    cells = {id(cell): cell for function in all_functions for cell in function.__closure__ or ()}
    contents = {key: cell_contents(cell) for key, cell in cells.items()}
    containers = {
        id(value): (value, copy.copy(value))
        for function in all_functions
        for value in outer_variables(function)
        if type(value) in _WRITABLE and value is not function.__globals__
    }
    try:
        yield
    finally:
        for key, cell in cells.items():
            if contents[key] is not _EMPTY:
                cell.cell_contents = contents[key]
        for container, before in containers.values():
            # Only containers that changed: other threads may be reading the rest.
            if not _is_same(container, before):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(
                    before
                )


def _is_same(container: Any, other: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if len(container) != len(other):
        return False
    if isinstance(container, dict) and not _is_same([*container.values()], [*other.values()]):
        return False
    return all(map(is_, container, other))


def functions_of(modules: Iterable[nn.Module], others: Iterable[object] = ()) -> list[FunctionType]:
    """The functions in modules' attributes and hooks, in parameters' hooks and in `others`."""
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
    """The contents of a function, container, optimizer or module; others may lead anywhere."""
    if isinstance(value, FunctionType):
        return outer_variables(value)
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


def outer_variables(function: FunctionType) -> list[Any]:
    """The values of a function's outer variables; global functions only of the same module."""
    values = [
        *map(cell_contents, function.__closure__ or ()),
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


def cell_contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
