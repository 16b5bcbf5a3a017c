"""How each kind of object is saved and restored, in place, for `RunState`."""

from __future__ import annotations

import array
import functools
import io
import queue
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from memcallback.integrations.lightning.fit.iterators import is_read, position_in
from memcallback.step.copies.generators import generator_state

Restore = Callable[[], object]
#: Of the standard library's objects that `state_of` restores.
WITH_STATE = (io.IOBase, bytearray, array.array, queue.SimpleQueue)
_MISSING = object()


# Tensors and arrays.


def storage_bytes_of(storage: torch.UntypedStorage) -> Restore:
    """Restore a storage's bytes."""
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


def tensor_view(tensor: torch.Tensor) -> Restore:
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


def is_array(obj: object) -> bool:
    """Whether an object is an array of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(obj), numpy.ndarray)


def array_values(values: Any) -> Restore:
    """Restore an array of NumPy."""
    saved = values.copy()

    def restore() -> None:
        if values.shape == saved.shape and values.tobytes() != saved.tobytes():
            values[...] = saved

    return restore


# Containers.


def container(obj: Any) -> Restore:
    """Restore the entries of a dictionary, list, set or deque."""
    if isinstance(obj, dict):
        return entries_in_order(obj)
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


def entries_in_order(obj: dict[Any, Any]) -> Restore:
    """Restore a dictionary, its order too."""
    kind: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
    saved = list(kind.items(obj))
    factory = obj.default_factory if isinstance(obj, defaultdict) else None

    def restore() -> None:
        if isinstance(obj, defaultdict) and obj.default_factory is not factory:
            obj.default_factory = factory
        if len(obj) == len(saved) and all(
            key is saved_key and value is saved_value
            for (key, value), (saved_key, saved_value) in zip(kind.items(obj), saved, strict=True)
        ):
            return
        kind.clear(obj)
        for key, value in saved:
            kind.__setitem__(obj, key, value)

    return restore


def numbers(values: Any) -> Restore:
    """Restore a bytearray or an `array.array`."""
    saved = values[:]

    def restore() -> None:
        if values != saved:
            values[:] = saved

    return restore


def simple_queue(items: Any) -> Restore:
    """Restore a SimpleQueue, which shows its items only as it gives them away."""
    saved = _taken(items)
    for item in saved:
        items.put(item)

    def restore() -> None:
        _taken(items)
        for item in saved:
            items.put(item)

    return restore


def _taken(items: Any) -> list[object]:
    taken: list[object] = []
    with suppress(queue.Empty):
        while True:
            taken.append(items.get_nowait())
    return taken


# Variables.


def namespace(variables: dict[str, Any], saved: dict[str, Any]) -> Restore:
    """Restore the variables of a module; only those that changed, since other threads read them."""

    def restore() -> None:
        for name, value in saved.items():
            if variables.get(name, _MISSING) is not value:
                variables[name] = value
        new = [name for name in variables.keys() - saved.keys() if is_kept(name)]
        # Compiled code has put its own variables there, such as __compiled_fn_1, and stays.
        if any(name.startswith("__") and not name.endswith("__") for name in new):
            return
        for name in new:
            # A part of a package that a trial imported stays imported, so it stays found.
            if not isinstance(variables[name], types.ModuleType):
                del variables[name]

    return restore


def is_kept(name: str) -> bool:
    """Whether a variable is the program's own, or says which warnings were shown."""
    is_pythons = name.startswith("__") and name.endswith("__")
    return not is_pythons or name == "__warningregistry__"


def class_attributes(kind: type) -> Restore:
    """Restore the attributes of a class; only those that changed."""
    saved = dict(vars(kind))

    def restore() -> None:
        for name, value in saved.items():
            if vars(kind).get(name, _MISSING) is not value:
                type.__setattr__(kind, name, value)
        for name in vars(kind).keys() - saved.keys():
            if is_kept(name):
                type.__delattr__(kind, name)

    return restore


def cell(own: types.CellType) -> tuple[list[object], Restore | None]:
    """The content of a closure's variable, and how it is restored."""
    try:
        saved = own.cell_contents
    except ValueError:  # an empty cell
        return [], None

    def restore() -> None:
        own.cell_contents = saved

    return [saved], restore


def defaults(function: types.FunctionType) -> Restore:
    """Restore the default arguments of a function; a dictionary of them is restored apart."""
    by_place, by_name = function.__defaults__, function.__kwdefaults__

    def restore() -> None:
        if function.__defaults__ is not by_place:
            function.__defaults__ = by_place
        if function.__kwdefaults__ is not by_name:
            function.__kwdefaults__ = by_name

    return restore


def own_class(obj: object) -> Restore:
    """Restore an object's class, which lazy modules change."""
    kind = type(obj)

    def restore() -> None:
        if type(obj) is not kind:
            object.__setattr__(obj, "__class__", kind)

    return restore


def slots_of(obj: object) -> tuple[dict[str, object], Restore | None]:
    """The slots of an object that are filled, and how they are restored."""
    names = [
        name
        for kind in type(obj).__mro__
        if "__slots__" in vars(kind)
        for name, value in vars(kind).items()
        if isinstance(value, types.MemberDescriptorType)
    ]
    filled = {name: getattr(obj, name) for name in names if hasattr(obj, name)}

    def restore() -> None:
        for name in names:
            if name in filled:
                object.__setattr__(obj, name, filled[name])
            elif hasattr(obj, name):
                object.__delattr__(obj, name)

    return filled, restore if names else None


# Caches, generators, files.


def cache(cached: Any, results: dict[Any, Any]) -> Restore:
    """Restore a `functools.lru_cache`, given the dictionary of its results.

    One that was empty is emptied: what it computes again is what it would have computed first, with
    the same random numbers. From one without a limit, the trial's results are taken. One with a
    limit that was in use can only be emptied, and what was in it may be the only one of its kind (a
    model, a connection), so there the trial's results stay: they are values of the real step, and
    keep their memory.
    """
    before = cached.cache_info()
    saved = dict(results)

    def restore() -> None:
        if not before.currsize and cached.cache_info() != before:
            cached.cache_clear()
        elif before.maxsize is None:
            for key in results.keys() - saved.keys():
                del results[key]
            results.update(saved)

    return restore


def state_of(obj: Any) -> Restore | None:
    """Restore an object that gives and takes its state; None for any other object."""
    if isinstance(obj, (io.BytesIO, io.StringIO)):
        return _text(obj)
    if isinstance(obj, io.IOBase):
        return _position(obj) if is_read(obj) else lambda: None  # written: it has the text by now
    if isinstance(obj, (bytearray, array.array)):
        return numbers(obj)
    if isinstance(obj, queue.SimpleQueue):
        return simple_queue(obj)
    return generator_state(obj)


def _text(file: Any) -> Restore:
    saved = None if file.closed else file.__getstate__()

    def restore() -> None:
        if saved is not None and (file.closed or file.__getstate__() != saved):
            file.__setstate__(saved)

    return restore


def _position(file: Any) -> Restore:
    position = position_in(file)

    def restore() -> None:
        if position is not None and not file.closed and position_in(file) != position:
            file.seek(position)

    return restore


def process(device: torch.device) -> Iterator[Restore]:
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
