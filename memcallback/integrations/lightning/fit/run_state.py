"""RunState: takes a snapshot of everything a trial can change, and restores it.

A checkpoint holds weights, optimizer state and progress. It lacks a module's own counters and
lists, metric states, non-persistent buffers, gradients, random generators, and the identity of
objects. So we do not ask objects for their state. We visit every object reachable from the Trainer,
its module and its data, and save its parts: attributes, entries of containers, bytes of storages,
states of generators. To restore, we compare, and write only what has changed, into the same
objects: the optimizer keeps its parameters, and new attributes are removed.

The bytes are saved in CPU memory. The snapshot keeps objects alive, so a buffer that training
replaces stays on the device beside the new one.

Not restored, because they cannot be or belong to others: files and other processes, objects held
only by globals and classes, running iterators, threads, loggers, compiled code; tensors and arrays
of a dataset, which are its data; entries of containers with more than 100,000.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from memcallback.core.tensors import storages_of, walk
from memcallback.core.torch_private import storage_id

Restore = Callable[[], object]
#: The entries of larger containers are data, not state.
_MAX_ENTRIES = 100_000
#: Other objects of the standard library belong to the interpreter or to other threads.
_PLAIN_DATA = (
    dict,
    list,
    set,
    deque,
    tuple,
    frozenset,
    types.SimpleNamespace,
    argparse.Namespace,
    functools.partial,
    random.Random,
)
#: Objects of these packages write to files, screens or the network, or are compiled code.
_FOREIGN = ("tensorboard", "tensorboardX", "wandb", "mlflow", "neptune", "comet_ml", "rich", "tqdm")
_FOREIGN_MODULES = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx",
    "torch.distributed",
    "torch.utils.tensorboard",
)
_ATOMS = (
    *(str, bytes, int, float, complex, type(None), type, range, slice),
    *(
        types.ModuleType,
        types.BuiltinFunctionType,
        types.CodeType,
        types.FrameType,
        types.TracebackType,
    ),
    *(weakref.ref, weakref.ProxyType, weakref.CallableProxyType),
    *(torch.dtype, torch.device, torch.layout),
)


class RunState:
    """The state of a training at one moment."""

    def __init__(
        self, *roots: object, device: torch.device, leave_alone: Iterable[object] = ()
    ) -> None:
        # By id, and kept alive, so that ids stay unique.
        self._seen: dict[int, object] = {id(obj): obj for obj in leave_alone}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._restores: list[Restore] = list(_globals(device))
        datasets: list[object] = []
        self._visit([*roots], datasets, are_data=False)
        self._visit([*datasets], datasets, are_data=True)

    def restore(self) -> None:
        """Restore everything; can be called again."""
        for restore in self._restores:
            restore()

    def _visit(self, roots: list[object], datasets: list[object], *, are_data: bool) -> None:
        """Save all reachable objects; add datasets to `datasets` instead, unless `are_data`."""

        def children(obj: object) -> list[object] | None:
            if _is_left_alone(obj):
                return None
            if isinstance(obj, Dataset) and not are_data:
                datasets.append(obj)
                return None
            if are_data and (isinstance(obj, torch.Tensor) or _is_array(obj)):
                return []
            inner: list[object] = []
            for parts, restore in self._parts(obj):
                inner.extend(parts)
                if restore is not None:
                    self._restores.append(restore)
            return inner

        for _ in walk(roots, children, self._seen):
            pass

    def _parts(self, obj: object) -> Iterator[tuple[Iterable[object], Restore | None]]:
        """Yield the parts of an object, and the function that restores them."""
        if isinstance(obj, torch.Tensor):
            yield from self._tensor(obj)
        elif _is_array(obj):
            yield (), _array(obj)
        elif (state := _generator_state(obj)) is not None:
            yield (), state
            return
        elif isinstance(obj, types.CellType):
            yield _cell(obj)
        elif isinstance(obj, types.MethodType):
            yield (obj.__self__, obj.__func__), None
        elif isinstance(obj, types.FunctionType):
            yield (obj.__closure__ or ()), None
            yield (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()), None
        elif isinstance(obj, functools.partial):
            yield (obj.func, *obj.args, obj.keywords), None
        elif isinstance(obj, (tuple, frozenset)):
            yield _few(obj), None
        elif isinstance(obj, (dict, list, set, deque)):
            yield _few(_entries(obj)), _container(obj)
        yield from _attributes(obj)

    def _tensor(self, tensor: torch.Tensor) -> Iterator[tuple[Iterable[object], Restore | None]]:
        if torch.nn.parameter.is_lazy(tensor):
            yield (), None
            return
        for storage in storages_of(tensor):
            if storage_id(storage) not in self._storages and storage.device.type != "meta":
                self._storages[storage_id(storage)] = storage
                yield (), _bytes(storage)
        yield ((tensor.grad,) if tensor.is_leaf else ()), _tensor(tensor)


def _few(entries: Any) -> Iterable[object]:
    return entries if len(entries) <= _MAX_ENTRIES else ()


def _entries(obj: Any) -> list[object]:
    if isinstance(obj, dict):
        return [entry for key_and_value in obj.items() for entry in key_and_value]
    return list(obj)


def _is_left_alone(obj: object) -> bool:
    if isinstance(obj, _ATOMS):
        return True
    name = type(obj).__module__ or ""
    first = name.partition(".")[0]
    if first in _FOREIGN or name.startswith(_FOREIGN_MODULES):
        return True
    if isinstance(obj, (*_PLAIN_DATA, types.FunctionType, types.MethodType, types.CellType)):
        return False
    # A running iterator cannot be rewound. With restored attributes it would skip or repeat items.
    if hasattr(type(obj), "__next__"):
        return True
    return first in sys.stdlib_module_names


def _is_array(obj: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.ndarray)


# How each kind of object is restored.


def _bytes(storage: torch.UntypedStorage) -> Restore:
    if not storage.nbytes():
        return lambda: None
    saved = _on_cpu(storage)

    def restore() -> None:
        # Write only changes: the storage may be a file that is mapped into memory.
        if storage.nbytes() == len(saved) and not torch.equal(_on_cpu(storage), saved):
            storage.copy_(saved.untyped_storage(), non_blocking=False)

    return restore


def _on_cpu(storage: torch.UntypedStorage) -> torch.Tensor:
    """Copy a storage's bytes."""
    return (
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).to("cpu", copy=True)
    )


def _tensor(tensor: torch.Tensor) -> Restore:
    """Restore a tensor's view of its storage, requires_grad and gradient."""
    with torch.no_grad():
        alias = tensor.detach()
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    grad = tensor.grad if is_leaf else None

    def restore() -> None:
        if not _is_same_view(tensor, alias):
            tensor.data = alias
        if is_leaf and tensor.is_leaf:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad

    return restore


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one.shape == other.shape
    return one.device == other.device and one.is_set_to(other)


def _array(array: Any) -> Restore:
    saved = array.copy()

    def restore() -> None:
        if array.shape == saved.shape and array.tobytes() != saved.tobytes():
            array[...] = saved

    return restore


def _container(obj: Any) -> Restore:
    if isinstance(obj, dict):
        return _dict(obj)
    saved = list(obj)

    def restore() -> None:
        if isinstance(obj, set):
            if len(obj) != len(saved) or any(item not in obj for item in saved):
                set.clear(obj)
                set.update(obj, saved)
        elif len(obj) != len(saved) or any(
            item is not saved_item for item, saved_item in zip(obj, saved, strict=True)
        ):
            if isinstance(obj, deque):
                deque.clear(obj)
                deque.extend(obj, saved)
            else:
                list.__setitem__(obj, slice(None), saved)

    return restore


def _dict(obj: dict[Any, Any]) -> Restore:
    kind: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
    saved = list(kind.items(obj))

    def restore() -> None:
        if len(obj) == len(saved) and all(
            key is saved_key and value is saved_value
            for (key, value), (saved_key, saved_value) in zip(kind.items(obj), saved, strict=True)
        ):
            return
        kind.clear(obj)
        for key, value in saved:
            kind.__setitem__(obj, key, value)

    return restore


def _cell(cell: types.CellType) -> tuple[Iterable[object], Restore | None]:
    try:
        saved = cell.cell_contents
    except ValueError:  # an empty cell
        return (), None

    def restore() -> None:
        cell.cell_contents = saved

    return (saved,), restore


def _attributes(obj: Any) -> Iterator[tuple[Iterable[object], Restore | None]]:
    """Attributes in the object's dictionary and slots, and its class, which lazy modules change."""
    try:
        attributes = getattr(obj, "__dict__", None)
    except Exception:  # a user's class may define __getattribute__, and fail
        attributes = None
    if isinstance(attributes, dict):
        yield list(attributes.values()), _dict(attributes)
        yield (), functools.partial(_restore_class, obj, type(obj))
    slots = [
        name for kind in type(obj).__mro__ if "__slots__" in vars(kind) for name in _slots_of(kind)
    ]
    if slots:
        filled = {name: getattr(obj, name) for name in slots if hasattr(obj, name)}
        yield list(filled.values()), functools.partial(_restore_slots, obj, slots, filled)


def _slots_of(kind: type) -> list[str]:
    return [
        name for name, value in vars(kind).items() if isinstance(value, types.MemberDescriptorType)
    ]


def _restore_class(obj: object, kind: type) -> None:
    if type(obj) is not kind:
        object.__setattr__(obj, "__class__", kind)


def _restore_slots(obj: object, slots: list[str], filled: dict[str, object]) -> None:
    for name in slots:
        if name in filled:
            object.__setattr__(obj, name, filled[name])
        elif hasattr(obj, name):
            object.__delattr__(obj, name)


def _generator_state(obj: Any) -> Restore | None:
    """Restore a random generator; None for any other object."""
    if isinstance(obj, torch.Generator):
        return functools.partial(obj.set_state, obj.get_state())
    if isinstance(obj, random.Random):
        return functools.partial(obj.setstate, obj.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.random.RandomState):
        return functools.partial(obj.set_state, obj.get_state())
    if numpy is not None and isinstance(obj, numpy.random.Generator):
        return functools.partial(setattr, obj.bit_generator, "state", obj.bit_generator.state)
    return None


def _globals(device: torch.device) -> Iterator[Restore]:
    """Restore the random generators of the process, and the modes that a training sets."""
    yield functools.partial(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    if device.type != "cpu":
        module = torch.get_device_module(device)
        every = "_all" if hasattr(module, "get_rng_state_all") else ""
        yield functools.partial(
            getattr(module, f"set_rng_state{every}"), getattr(module, f"get_rng_state{every}")()
        )
    yield functools.partial(torch.set_grad_enabled, torch.is_grad_enabled())
    yield functools.partial(torch.set_default_dtype, torch.get_default_dtype())
