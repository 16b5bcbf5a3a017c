"""Copy functions that refer to a copied model by a closure, a default, a global or their owner."""

from __future__ import annotations

import copy
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from memcallback.core.tensors import attributes, items_of, walk

_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
#: A container with more in it holds data rather than what a step keeps.
MAX_ITEMS = 10_000
#: Containers whose contents are restored. Those of one's own classes are not: their methods may do
#: anything.
WRITABLE = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


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
    copies made here refer to the copied parts instead, and share everything else. So does a copy of
    the object whose method one of `functions` is: of its attributes those are copied that hold
    parts.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[object] = ()) -> None:
        modules, functions = list(modules), list(functions)
        self._parts = {id(part) for module in modules for part in (module, *_tensors(module))}
        reached = functions_of(modules, functions)
        holding = [function for function in reached if self._holds(function)]
        #: Namespaces that get a copy, in which functions see what the others write.
        self._spaces = {
            id(function.__globals__)
            for function in holding
            if any(self._holds(function.__globals__[name]) for name in _global_names(function))
        }
        self._functions = [
            function
            for function in reached
            if function in holding or id(function.__globals__) in self._spaces
        ]
        self._copies: list[FunctionType] = []
        owners = {id(owner): owner for owner in map(owner_of, functions) if owner is not None}
        self._owners = [
            owner
            for owner in owners.values()
            if self._held_by(owner) and type(owner).__new__ is object.__new__
        ]
        #: What holds no part is shared, and not copied by `copy.deepcopy`.
        self._shared = [
            shared
            for shared in (*functions, *owners.values())
            if not self._holds(shared) and not self._held_by(owner_of(shared) or shared)
        ]

    def begin(self, memo: dict[int, Any]) -> None:
        """Put copies with empty closures into the memo of `copy.deepcopy`."""
        cells: dict[int, CellType] = {}
        spaces: dict[int, dict[str, Any]] = {}
        self._copies = [self._empty(function, cells, spaces) for function in self._functions]
        memo.update(zip(map(id, self._functions), self._copies, strict=True))
        memo.update((id(shared), shared) for shared in self._shared)
        for owner in self._owners:
            copied = memo[id(owner)] = object.__new__(type(owner))
            vars(copied).update(attributes_with_own_containers(owner))

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
                is_ours = id(function.__globals__) in self._spaces
                if is_ours and self._holds_or_is_copied(function.__globals__[name]):
                    copied.__globals__[name] = copy.deepcopy(function.__globals__[name], memo)
        for owner in self._owners:
            vars(memo[id(owner)]).update(
                (name, copy.deepcopy(vars(owner)[name], memo)) for name in self._held_by(owner)
            )

    def _holds_or_is_copied(self, value: object) -> bool:
        return self._holds(value) or any(value is function for function in self._functions)

    def _empty(
        self,
        function: FunctionType,
        cells: dict[int, CellType],
        spaces: dict[int, dict[str, Any]],
    ) -> FunctionType:
        closure = tuple(
            cells.setdefault(id(cell), CellType()) if self._holds(cell_contents(cell)) else cell
            for cell in function.__closure__ or ()
        )
        variables = function.__globals__
        if id(variables) in self._spaces:
            variables = spaces.setdefault(id(variables), dict(variables))
        copied = FunctionType(
            function.__code__, variables, function.__name__, function.__defaults__, closure
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        return copied

    def _holds(self, value: object) -> bool:
        return any(id(reached) in self._parts for reached in walk([value], contents_of))

    def _held_by(self, owner: object) -> list[str]:
        """The attributes of an object that hold parts; optimizers are none of a loss's."""
        attributes = getattr(owner, "__dict__", None)
        if not isinstance(attributes, dict) or isinstance(owner, (FunctionType, nn.Module)):
            return []
        return [
            name
            for name, value in attributes.items()
            if not isinstance(value, torch.optim.Optimizer) and self._holds(value)
        ]


@contextmanager
def functions_found_in_memo() -> Iterator[None]:
    """Have `copy.deepcopy` look for functions in its memo, as before Python 3.14.

    What is not there stays shared, so other copies made meanwhile are what they would be.
    """
    at_once: set[type] = getattr(copy, "_atomic_types", set())
    copiers: dict[type, Any] = getattr(copy, "_deepcopy_dispatch", {})
    if FunctionType not in at_once:
        yield
        return
    copiers[FunctionType] = lambda function, memo: function
    at_once.discard(FunctionType)
    try:
        yield
    finally:
        at_once.add(FunctionType)
        del copiers[FunctionType]


def is_writable(value: object) -> bool:
    """Whether a value is a container whose contents are restored."""
    # `in` would ask a class of the user's whether it is equal.
    kind = type(value)
    return any(kind is each for each in WRITABLE)


def attributes_with_own_containers(obj: object) -> dict[str, Any]:
    """An object's attributes with copies of containers, and of those in them; the rest is shared.

    Each container is copied once: two attributes that share one share its copy.
    """
    copies: dict[int, Any] = {}
    unread: list[Any] = []

    def own(value: Any) -> Any:
        if not is_writable(value) or len(value) > MAX_ITEMS:
            return value
        if id(value) not in copies:
            copies[id(value)] = copy.copy(value)
            unread.append(copies[id(value)])
        return copies[id(value)]

    values = {name: own(value) for name, value in vars(obj).items()}
    while unread:
        container = unread.pop()
        if isinstance(container, dict):
            dict.update(container, {key: own(item) for key, item in container.items()})
        elif isinstance(container, (list, deque)):
            items = [*map(own, container)]
            container.clear()
            container.extend(items)
    return values


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
        if is_writable(value) and value is not function.__globals__
    }
    try:
        yield
    finally:
        for key, cell in cells.items():
            restore_cell(cell, contents[key])
        for container, before in containers.values():
            restore_container(container, before)


def restore_cell(cell: CellType, contents: object) -> None:
    """Give a variable of a closure what `cell_contents` gave; it may have been empty."""
    if cell_contents(cell) is contents:
        return
    if contents is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = contents


def restore_container(container: Any, before: Any) -> None:
    """Give a container of `WRITABLE` what a copy of it has, in its order."""
    # Only if it has changed: other threads may be reading it.
    if _is_same(container, before):
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _is_same(container: Any, other: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if len(container) != len(other):
        return False
    if isinstance(container, dict) and not _is_same([*container.values()], [*other.values()]):
        return False
    return all(map(is_, container, other))


def functions_of(modules: Iterable[nn.Module], others: Iterable[object] = ()) -> list[FunctionType]:
    """The functions in modules' attributes and hooks, in parameters' hooks and in `others`."""
    return [value for value in _reached(modules, others) if isinstance(value, FunctionType)]


def optimizers_in_hooks(modules: Iterable[nn.Module]) -> list[torch.optim.Optimizer]:
    """The optimizers that the hooks of modules and of their parameters reach."""
    return [value for value in _reached(modules) if isinstance(value, torch.optim.Optimizer)]


def _reached(modules: Iterable[nn.Module], others: Iterable[object] = ()) -> Iterator[object]:
    values = list(others)
    for module in modules:
        values += [
            *vars(module).values(),
            *(hook for tensor in _tensors(module) for _, hook in hooks_of(tensor)),
        ]
    return walk(values, contents_of)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def owner_of(function: object) -> object | None:
    """The object whose method a function is, or None; None for methods of modules and classes."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function.__self__ if isinstance(function, MethodType) else None
    return None if isinstance(owner, (type, nn.Module)) else owner


def contents_of(value: object) -> list[Any] | None:
    """The contents of a function, container, optimizer or module; others may lead anywhere.

    A container with very many items holds data.
    """
    if isinstance(value, FunctionType):
        return outer_variables(value)
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    for container in _CONTAINERS:
        if isinstance(value, container):
            if container.__len__(value) > MAX_ITEMS:
                return None
            keys = dict.keys(value) if isinstance(value, dict) else ()
            return [*keys, *(items_of(value) or ())]
    if isinstance(value, Mapping):
        return list(attributes(value).values())
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return [*value.modules()] if isinstance(value, nn.Module) else None


def outer_variables(function: FunctionType) -> list[Any]:
    """The values of a function's outer variables; global functions only of the same module."""
    return [value for _, value in named_outer_variables(function)]


def named_outer_variables(function: FunctionType) -> list[tuple[str, Any]]:
    """The outer variables of a function with their names."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    cells = map(cell_contents, function.__closure__ or ())
    variables = [
        *zip(code.co_freevars, cells, strict=True),
        *zip(names[len(names) - len(defaults) :], defaults, strict=True),
        *(function.__kwdefaults__ or {}).items(),
    ]
    for name in _global_names(function):
        value = function.__globals__[name]
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            variables.append((name, value))
    return variables


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
