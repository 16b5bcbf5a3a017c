"""RunState: takes a snapshot of everything a trial can change, and restores it.

A checkpoint holds weights, optimizer state and progress. It lacks a module's own counters and
lists, metric states, non-persistent buffers, gradients, random generators, what the user's files
keep in global variables, and the identity of objects. So we do not ask objects for their state. We
visit every object reachable from the Trainer, its module, its data, and the variables and classes
of the user's own files, and save its parts: attributes, entries of containers, bytes of storages,
states of generators. To restore, we compare, and write only what has changed, into the same
objects: the optimizer keeps its parameters, and new attributes are removed.

The bytes are saved in CPU memory. The snapshot keeps objects alive, so a buffer that training
replaces stays on the device beside the new one.

`docs/what-is-put-back.md` has the table of what is put back and what is not.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from memcallback.core.tensors import storages_of
from memcallback.core.torch_private import storage_id
from memcallback.core.units import format_bytes
from memcallback.integrations.lightning.fit import restores
from memcallback.integrations.lightning.fit.iterators import (
    MADE_AGAIN,
    Refusals,
    StandIns,
    is_used_up,
)
from memcallback.integrations.lightning.fit.left_alone import (
    HOLDERS,
    LRU_CACHE,
    holds_users_iterators,
    is_foreign,
    is_left_alone,
    may_be_visited,
)
from memcallback.integrations.lightning.fit.restores import Restore, is_kept
from memcallback.integrations.lightning.fit.signals import deferred_signals
from memcallback.integrations.lightning.fit.user_code import (
    is_users_class,
    is_users_function,
    users_modules,
)

#: The entries of larger containers are data, not state.
_MAX_ENTRIES = 100_000
#: Without attributes, and by far the most.
_BARE = (dict, list, set)
#: A copy of everything may take so much of the memory that is free.
_MOST_OF_MEMORY = 0.8


class _Found(NamedTuple):
    """An object, what holds it in words, and whether that is the user's.

    With `put`, which puts another object in its place.
    """

    obj: object
    label: str
    is_users: bool
    put: Callable[[Any], object] | None = None


class RunState:
    """The state of a training, and of the user's files, at one moment.

    A trial runs inside `trial()`, which also saves the running iterators.
    """

    def __init__(
        self, *roots: object, device: torch.device, leave_alone: Iterable[object] = ()
    ) -> None:
        # By id, and kept alive, so that ids stay unique.
        self._seen: dict[int, object] = {id(obj): obj for obj in leave_alone}
        self._kept: list[object] = []
        self._is_visited: dict[type, bool] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        #: Where tensors and arrays of datasets begin in memory.
        self._data: set[int] = set()
        self._free_bytes = psutil.virtual_memory().available * _MOST_OF_MEMORY
        self._restores: list[Restore] = list(restores.process(device))
        self._used_up: list[_Found] = []
        self.refusals = Refusals()
        #: Datasets, and the variables and classes of the user's files: visited in this order, so
        #: that what a dataset holds is known to be data.
        self._datasets: list[_Found] = []
        self._later: list[_Found] = []
        with _without_collection():
            self._visit([_Found(root, f"the {type(root).__name__}", False) for root in roots])
            for file, variables in users_modules(list(self._is_visited)):
                self._namespace(variables, file)
            while self._datasets or self._later:
                later, self._later = self._later, []
                datasets, self._datasets = self._datasets + _datasets_in(later), []
                self._visit(datasets, are_data=True)
                self._visit(later)

    def restore(self) -> None:
        """Restore everything; can be called again."""
        with deferred_signals():
            errors = [error for restore in self._restores if (error := _error_of(restore))]
        if errors:
            raise errors[0]

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Save the running iterators inside the context, and restore everything at its end."""
        stand_ins = StandIns(self.refusals)
        try:
            for found in self._used_up:
                assert found.put is not None
                found.put(stand_ins.of(found.obj, found.label))
            yield
            self.refusals.check()
        finally:
            self.restore()

    def _visit(self, roots: list[_Found], *, are_data: bool = False) -> None:
        """Save all reachable objects, but for those to be visited later."""
        pending = [*roots]
        while pending:
            found = pending.pop()
            obj = found.obj
            try:
                if found.put is not None and found.is_users and is_used_up(obj):
                    self._used_up.append(found)
                if id(obj) in self._seen:
                    continue
                kind = type(obj)
                if kind not in self._is_visited:
                    self._is_visited[kind] = may_be_visited(kind)
                if not self._is_visited[kind] or is_left_alone(obj):
                    continue
                if isinstance(obj, Dataset) and not are_data:
                    self._datasets.append(found)
                    continue
                self._seen[id(obj)] = obj
                if are_data and self._is_data(obj):
                    continue
                inner: list[_Found] = []
                for parts, restore in self._parts(obj, found):
                    inner.extend(parts)
                    if restore is not None:
                        self._restores.append(restore)
            except Exception:
                # A user's object can fail in any way when it is looked at, and is left alone. A
                # tensor that cannot be saved could not be restored.
                if issubclass(type(obj), torch.Tensor) or restores.is_array(obj):
                    raise
                continue
            pending.extend(inner)

    def _is_data(self, obj: object) -> bool:
        if isinstance(obj, torch.Tensor):
            self._data.update(storage.data_ptr() for storage in storages_of(obj))
            return True
        if restores.is_array(obj):
            self._data.add(_address(obj))
            return True
        return False

    def _parts(self, obj: Any, found: _Found) -> Iterator[tuple[Iterable[_Found], Restore | None]]:
        """Yield what an object holds, and the function that restores it."""
        within = functools.partial(_Found, label=found.label, is_users=found.is_users)
        if type(obj) in _BARE:
            yield self._entries(obj, within), restores.container(obj)
            return
        if isinstance(obj, type):
            yield self._class_parts(obj)
            return
        if isinstance(obj, torch.Tensor):
            yield from self._tensor(obj, found)
        elif restores.is_array(obj):
            yield self._array(obj, found)
        elif isinstance(obj, LRU_CACHE):
            held = gc.get_referents(obj)
            own = next(part for part in held if type(part) is dict and part is not vars(obj))
            self._seen[id(own)] = own  # bound to the cache's other parts, so not to be written
            yield map(within, (*held, *own, *own.values())), restores.cache(obj, own)
        elif (state := restores.state_of(obj)) is not None:
            yield (), state
            return
        elif isinstance(obj, types.CellType):
            contents, restore = restores.cell(obj)
            put = functools.partial(setattr, obj, "cell_contents")
            yield (within(content, put=put) for content in contents), restore
        elif isinstance(obj, types.MethodType):
            yield map(within, (obj.__self__, obj.__func__)), None
        elif isinstance(obj, types.FunctionType):
            yield self._function(obj, found)
        elif isinstance(obj, functools.partial):
            yield map(within, (obj.func, *obj.args, obj.keywords)), None
        elif isinstance(obj, (tuple, frozenset)):
            yield map(within, _few(obj)), None
        elif isinstance(obj, (dict, list, set, deque)):
            yield self._entries(obj, within), restores.container(obj)
        elif isinstance(obj, HOLDERS) or type(obj).__module__ in MADE_AGAIN:
            yield map(within, gc.get_referents(obj)), None
            return
        elif isinstance(obj, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            self._kept.append(list(obj.items()))  # else an entry may be gone by the end of a trial
        yield from self._attributes(obj, found)

    def _entries(self, obj: Any, within: Callable[..., _Found]) -> list[_Found]:
        """What a container holds, unless it holds so much that it is data."""
        entries: list[_Found] = []
        if isinstance(obj, dict):
            put = functools.partial(dict.__setitem__, obj)
            for key, value in list(dict.items(obj)) if len(obj) <= _MAX_ENTRIES else ():
                entries += (within(key), within(value, put=functools.partial(put, key)))
        elif isinstance(obj, set):
            entries += map(within, _few(obj))
        else:
            set_item: Any = list.__setitem__ if isinstance(obj, list) else deque.__setitem__
            put = functools.partial(set_item, obj)
            for place, value in enumerate(_few(obj)):
                entries.append(within(value, put=functools.partial(put, place)))
        if isinstance(obj, defaultdict):
            make = functools.partial(setattr, obj, "default_factory")
            entries.append(within(obj.default_factory, put=make))
        return entries

    def _attributes(
        self, obj: Any, found: _Found
    ) -> Iterator[tuple[Iterable[_Found], Restore | None]]:
        """Attributes in the object's dictionary and slots, and its class."""
        kind = type(obj)
        is_users = holds_users_iterators(obj, is_owner_users=found.is_users)

        def attribute(name: str, value: object, put: Callable[[Any], object]) -> _Found:
            return _Found(value, f"attribute {name!r} of {kind.__name__}", is_users, put)

        try:
            attributes = getattr(obj, "__dict__", None)
        except Exception:  # a user's class may define __getattribute__, and fail
            attributes = None
        if isinstance(obj, torch.nn.Module) and is_foreign(kind):  # a compiled module
            names = ("_parameters", "_buffers", "_modules")
            yield [_Found(vars(obj).get(name), found.label, is_users) for name in names], None
            return
        if isinstance(attributes, dict):
            put = functools.partial(dict.__setitem__, attributes)
            yield (
                [
                    attribute(str(name), value, functools.partial(put, name))
                    for name, value in list(attributes.items())
                ],
                restores.entries_in_order(attributes),
            )
            yield (), restores.own_class(obj)
        filled, restore = restores.slots_of(obj)
        slots = [
            attribute(name, value, functools.partial(object.__setattr__, obj, name))
            for name, value in filled.items()
        ]
        yield slots, restore
        if is_users_class(kind):
            self._later.append(_Found(kind, "", True))

    def _class_parts(self, kind: type) -> tuple[list[_Found], Restore]:
        label = f"attribute {{!r}} of class {kind.__name__}"
        own = [
            _Found(value, label.format(name), True, functools.partial(type.__setattr__, kind, name))
            for name, value in vars(kind).items()
        ]
        bases = [_Found(base, "", True) for base in kind.__mro__[1:]]
        return own + bases, restores.class_attributes(kind)

    def _function(self, obj: types.FunctionType, found: _Found) -> tuple[list[_Found], Restore]:
        by_place = functools.partial(setattr, obj, "__defaults__")
        label = f"an argument's default of {obj.__name__}()"
        inner = [
            _Found(obj.__defaults__, label, found.is_users, by_place),
            _Found(obj.__kwdefaults__, label, found.is_users),
        ]
        inner += [
            _Found(own, f"variable {name!r} around {obj.__name__}()", found.is_users)
            for name, own in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True)
        ]
        if is_users_function(obj):
            file = obj.__code__.co_filename.rpartition("/")[2]
            inner = [one._replace(is_users=True) for one in inner]
            self._namespace(obj.__globals__, file)
        return inner, restores.defaults(obj)

    def _namespace(self, variables: dict[str, Any], file: str) -> None:
        """Save the variables of a file."""
        if id(variables) in self._seen:
            return
        self._seen[id(variables)] = variables
        own = {name: value for name, value in variables.items() if is_kept(name)}
        self._restores.append(restores.namespace(variables, own))
        put = functools.partial(dict.__setitem__, variables)
        self._later += [
            _Found(value, f"variable {name!r} of {file}", True, functools.partial(put, name))
            for name, value in own.items()
        ]

    def _tensor(
        self, tensor: torch.Tensor, found: _Found
    ) -> Iterator[tuple[Iterable[_Found], Restore | None]]:
        if torch.nn.parameter.is_lazy(tensor):
            return
        for storage in storages_of(tensor):
            if storage_id(storage) not in self._storages and storage.device.type != "meta":
                self._storages[storage_id(storage)] = storage
                if storage.data_ptr() not in self._data:
                    self._take_memory(storage.nbytes(), found)
                    yield (), restores.storage_bytes_of(storage)
        grads = (tensor.grad,) if tensor.is_leaf else ()
        yield (
            (_Found(grad, found.label, found.is_users) for grad in grads),
            restores.tensor_view(tensor),
        )

    def _array(self, array: Any, found: _Found) -> tuple[Iterable[_Found], Restore | None]:
        if _address(array) in self._data:
            return (), None
        items = array.ravel().tolist() if array.dtype == object else ()
        inner = [_Found(item, found.label, found.is_users) for item in _few(items)]
        if not array.flags.writeable:
            return inner, None
        self._take_memory(array.nbytes, found)
        return inner, restores.array_values(array)

    def _take_memory(self, num_bytes: int, found: _Found) -> None:
        self._free_bytes -= num_bytes
        if self._free_bytes < 0:
            raise ValueError(
                f"No trial is run: {found.label} holds {format_bytes(num_bytes)}, and this "
                "machine has too little free memory to keep a copy of all that a trial may change. "
                "Let only a Dataset hold large data (self.images = images), or make the array "
                "read-only (images.flags.writeable = False): neither is copied."
            )


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collection, which would go through a growing snapshot again and again."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _datasets_in(variables: list[_Found]) -> list[_Found]:
    """Datasets, and those of loaders, among variables."""
    held = [
        found._replace(obj=vars(found.obj).get("dataset"))
        if issubclass(type(found.obj), DataLoader)
        else found
        for found in variables
    ]
    return [found for found in held if issubclass(type(found.obj), Dataset)]


def _error_of(restore: Restore) -> Exception | None:
    try:
        restore()
    except Exception as error:  # of one object; the others are restored all the same
        return error
    return None


def _few(entries: Any) -> Iterable[object]:
    return entries if len(entries) <= _MAX_ENTRIES else ()


def _address(array: Any) -> int:
    """Where the memory of an array begins, of which it may show a part."""
    while restores.is_array(array.base):
        array = array.base
    return int(array.__array_interface__["data"][0])
