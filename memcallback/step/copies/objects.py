"""Deep-copy objects with another tensor in place of each, such as a fake one."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from memcallback.core.tensors import walk
from memcallback.core.torch_private import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    FakeTensorMode,
    tree_leaves,
)
from memcallback.core.units import MiB
from memcallback.isolation.child import is_in_child
from memcallback.step.copies.compiled import compile_as, has_compiled_code
from memcallback.step.copies.fakes import CannotBeFake, FakeFactory, refuse_unless_known
from memcallback.step.copies.functions import (
    FunctionCopies,
    functions_found_in_memo,
    hooks_of,
)
from memcallback.step.copies.known import remember_values

T = TypeVar("T")
AtCopy = Callable[[torch.Tensor, torch.Tensor], object]
_CPU = torch.device("cpu")
#: A copy shares larger plain data with the original: bytes of an array, items of a container.
_LARGE_BYTES, _LARGE_LENGTH = MiB, 10_000
_DATA_CONTAINERS = (dict, list, tuple, set, frozenset)
#: Large containers that were looked through in a process of its own, which makes many copies: each
#: with the kinds of its items, their number, and whether it is plain data.
_looked_through: dict[int, tuple[object, frozenset[type], int, bool]] = {}
#: The number of copies in progress, in all threads.
_num_copying = 0
_copying = threading.Lock()
# Attributes that tie a LightningModule to its run: lightning/pytorch/core/module.py,
# LightningModule.__init__.
_RUN_ATTRIBUTES = ("_trainer", "_fabric")


def fake_copy(obj: T, fake_mode: FakeTensorMode, *, compiles: bool = False) -> T:
    """Deep-copy an object with a fake tensor for every tensor.

    Every fake is on device `cpu` with the original's shape, strides, dtype and `requires_grad`. A
    parameter stays a parameter. Tensors that are the same object, or share a storage, do so in the
    copy. Gradients (`.grad`) are not copied.

    Differences from `copy.deepcopy`:

    - References to the Trainer and the Fabric of a LightningModule become None.
    - A `torch.device` that is an attribute of a module becomes `cpu`, so the `device` of a
      LightningModule is `cpu`.
    - A module compiled by `torch.compile` is replaced by the module inside, whose copy is compiled
      if `compiles` says so.
    - A dataset or data loader that is an attribute of a module is shared with the original, since
      it can be as large as the data; in a process of its own large plain data too.
    - An object that cannot be deep-copied (a lock, an open file, a Python generator) is shared with
      the original; its owner is copied.
    - A function that refers to a part of a copied module (a hook with its module in a closure) is
      copied, and refers to the copied part; so is the object whose method it is, but for attributes
      that hold no part. Other functions are shared, with their closures.
    - Hooks of parameters are copied with them.
    """
    return copy_with(obj, FakeFactory(fake_mode), at_copy=remember_values, compiles=compiles)


def copy_with(
    obj: T,
    make: Callable[[torch.Tensor], torch.Tensor],
    at_copy: AtCopy = lambda copied, tensor: None,
    *,
    compiles: bool = False,
) -> T:
    """Deep-copy an object as `fake_copy` does, with `make(tensor)` for each tensor.

    `at_copy(copied, tensor)` is called for each that is no parameter.
    """
    for module in _modules_of(obj):
        # A lazy parameter copies itself, unseen by the mode below.
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            refuse_unless_known(tensor)
    shared: list[Any] = _to_share(obj)
    functions = FunctionCopies(_modules_of(obj), _functions_in(obj))
    while True:
        memo: dict[int, Any] = {id(item): item for item in shared}
        memo.update(dict.fromkeys(map(id, _run_references(obj))))
        functions.begin(memo)
        try:
            with (
                _CopyMode(make, at_copy),
                torch.no_grad(),
                _copied_generators(),
                functions_found_in_memo(),
            ):
                for compiled in _compiled_modules(obj):
                    memo[id(compiled)] = copy.deepcopy(compiled._orig_mod, memo)
                copied = [*_copy_own_kinds(obj, make, memo), *_make_shells(obj, memo)]
                result = copy.deepcopy(obj, memo)
                for original, its_copy in copied:
                    vars(its_copy).update(copy.deepcopy(vars(original), memo))
                functions.complete(memo)
                _copy_hooks(obj, memo)
        except (CannotBeFake, RecursionError):
            raise
        except Exception as error:  # a user's object can refuse to be copied in any way
            culprit = _last_object_copied(error.__traceback__)
            if isinstance(culprit, nn.Module):
                raise ValueError(
                    f"A module of class {type(culprit).__name__} cannot be copied ({error}). "
                    "Give it a __deepcopy__ that works, or leave it out of the model."
                ) from error
            if (
                culprit is None
                or isinstance(culprit, torch.Tensor)
                or any(culprit is item for item in shared)
            ):
                raise
            shared.append(culprit)
        else:
            _settle(memo)
            for module in _modules_of(obj) if compiles else ():
                if has_compiled_code(module):
                    compile_as(memo[id(module)], module)
            return result


class _CopyMode(TorchFunctionMode):
    """Intercepts `copy.deepcopy` of tensors; that of a parameter clones its data."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], at_copy: AtCopy) -> None:
        super().__init__()
        self._make, self._at_copy = make, at_copy

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._make(tensor)
                self._at_copy(memo[id(tensor)], tensor)
            return memo[id(tensor)]
        if getattr(func, "__name__", None) == "clone" and isinstance(args[0], torch.Tensor):
            return self._make(args[0])
        if not all(issubclass(kind, torch.Tensor) for kind in types):
            # A graph that is traced again as it is copied: its proxies are no tensors.
            return func(*args, **(kwargs or {}))
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _copied_generators() -> Iterator[None]:
    """Copy random generators without a tensor: with a fake for its state PyTorch 2.6 crashes.

    Copies of generators in other threads meanwhile are the same as without this.
    """
    global _num_copying
    with _copying:
        _num_copying += 1
        copy._deepcopy_dispatch[torch.Generator] = (  # type: ignore[attr-defined]
            lambda generator, memo: generator.clone_state()
        )
    try:
        yield
    finally:
        with _copying:
            _num_copying -= 1
            if not _num_copying:
                del copy._deepcopy_dispatch[torch.Generator]  # type: ignore[attr-defined]


def _copy_own_kinds(
    obj: object, make: Callable[[torch.Tensor], torch.Tensor], memo: dict[int, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make copies of parameters that copy themselves, unseen by `make`, as quantized ones do.

    Their attributes are still to be copied; `own_kind` has the original's kind and their names.
    """
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in _modules_of(obj):
        for tensor in module._parameters.values():
            if tensor is None or id(tensor) in memo or not _copies_itself(tensor):
                continue
            fake: Any = nn.Parameter(make(tensor), tensor.requires_grad)
            fake.own_kind = type(tensor), tuple(vars(tensor))
            memo[id(tensor)] = fake
            copied.append((tensor, fake))
    return copied


def _make_shells(obj: object, memo: dict[int, Any]) -> list[tuple[nn.Module, nn.Module]]:
    """Make empty copies of modules whose `__new__` wants arguments, which `copy` does not give.

    Their attributes are still to be copied.
    """
    shells: list[tuple[nn.Module, nn.Module]] = []
    for module in _modules_of(obj):
        kind = type(module)
        if id(module) in memo or not _wants_arguments(kind):
            continue
        memo[id(module)] = shell = object.__new__(kind)
        shells.append((module, shell))
    return shells


def _wants_arguments(kind: type[nn.Module]) -> bool:
    """Whether a class says how it is made, and not how it is copied."""
    is_copied_as_usual = (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__setstate__ is nn.Module.__setstate__
        and not any(
            hasattr(kind, name) for name in ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
        )
    )
    return kind.__new__ is not object.__new__ and is_copied_as_usual


def _copies_itself(tensor: torch.Tensor) -> bool:
    own = type(tensor).__deepcopy__
    return own not in (torch.Tensor.__deepcopy__, nn.Parameter.__deepcopy__) and not isinstance(
        tensor, FakeTensor
    )


def _copy_hooks(obj: object, memo: dict[int, Any]) -> None:
    """Register copies of the hooks of parameters and buffers on their copies."""
    for tensor in {
        id(t): t
        for module in _modules_of(obj)
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }.values():
        for method, hook in hooks_of(tensor):
            getattr(memo[id(tensor)], method)(copy.deepcopy(hook, memo))


def _last_object_copied(traceback: TracebackType | None) -> Any:
    last = None
    while traceback is not None:
        if traceback.tb_frame.f_code is copy.deepcopy.__code__:
            last = traceback.tb_frame.f_locals["x"]
        traceback = traceback.tb_next
    return last


def _modules_of(obj: object) -> Iterator[nn.Module]:
    for leaf in tree_leaves(obj):
        if isinstance(leaf, nn.Module):
            yield from leaf.modules()


def _functions_in(obj: object) -> list[object]:
    kinds = (FunctionType, MethodType, functools.partial)
    return [leaf for leaf in tree_leaves(obj) if isinstance(leaf, kinds)]


def _run_references(obj: object) -> list[object]:
    return [
        vars(module)[name]
        for module in _modules_of(obj)
        for name in _RUN_ATTRIBUTES
        if vars(module).get(name) is not None
    ]


def _to_share(obj: object) -> list[Any]:
    return [
        value
        for module in _modules_of(obj)
        for value in vars(module).values()
        if isinstance(value, (Dataset, DataLoader)) or (is_in_child() and _is_large_data(value))
    ]


def _is_large_data(value: object) -> bool:
    """Whether a value is an array or container of plain data that takes long to copy.

    In a process of its own the trace may change it: nobody else sees that.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return bool(value.nbytes > _LARGE_BYTES and not value.dtype.hasobject)
    if not isinstance(value, _DATA_CONTAINERS) or len(value) <= _LARGE_LENGTH:
        return False
    items = value.values() if isinstance(value, dict) else value
    now = frozenset(map(type, items)), len(value)
    known, *then, is_plain = _looked_through.get(id(value), (None, frozenset(), 0, False))
    if known is not value or then != [*now]:
        is_plain = all(map(_is_plain, walk([value], _items)))
        _looked_through[id(value)] = value, *now, is_plain
    return is_plain


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float, complex, _DATA_CONTAINERS))


def _items(value: object) -> list[Any] | None:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else None


def _compiled_modules(obj: object) -> list[Any]:
    # Outer modules come first in modules(); a compiled module inside another must be in the memo
    # before it is reached.
    return [module for module in _modules_of(obj) if "_orig_mod" in module._modules][::-1]


def _settle(memo: dict[int, Any]) -> None:
    for module in [value for value in memo.values() if isinstance(value, nn.Module)]:
        attributes = vars(module)
        for name, value in attributes.items():
            if isinstance(value, torch.device):
                attributes[name] = _CPU
        if attributes.get("_compiled_call_impl") is not None:
            attributes["_compiled_call_impl"] = None
