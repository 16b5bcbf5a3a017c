"""untouched_objects(): takes the tensors of a trace out of what the user's own objects keep."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from memcallback.core.code_lines import is_library
from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import tensors_in, walk
from memcallback.core.torch_private import FakeTensor
from memcallback.step.copies.functions import cell_contents

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
#: A container with more in it holds data, and no objects that keep what a step makes.
_MAX_HELD = 100
_MAX_ITEMS = 10_000
_MAX_OBJECTS = 5_000
#: A trace makes copies of what modules and optimizers keep.
_NOT_OWN = (type, ModuleType, FunctionType, torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
_ABSENT = object()


@contextmanager
def untouched_objects(roots: Iterable[object]) -> Iterator[None]:
    """Restore the objects of the user's classes that keep fake tensors at the end, whole.

    Those that these values lead to. Others stay as the program has left them: what it does once,
    and notes in an object, is not done again. For a process without other threads.
    """
    known = [_Kept(own) for own in _objects(roots)]
    try:
        yield
    finally:
        for kept in known:
            kept.restore_if_fake()


class _Kept:
    """The attributes of an object, and the containers among them, as they were."""

    def __init__(self, own: dict[str, Any]) -> None:
        self._own, self._before = own, dict(own)
        self._contents = [
            (value, copy.copy(value))
            for value in self._before.values()
            if type(value) in _CONTAINERS and len(value) <= _MAX_ITEMS
        ]

    def restore_if_fake(self) -> None:
        """Put all back if a fake tensor is among what is new."""
        own, before = self._own, self._before
        new = [value for name, value in own.items() if before.get(name, _ABSENT) is not value]
        changed = [pair for pair in self._contents if not _is_same(*pair)]
        if not any(_holds_fakes(value) for value in (*new, *(pair[0] for pair in changed))):
            return
        for name in [name for name in own if name not in before]:
            del own[name]
        own.update(before)
        for container, contents in changed:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(
                contents
            )


def _is_same(container: Any, other: Any) -> bool:
    """Whether two containers hold the same objects."""
    if len(container) != len(other):
        return False
    values = (container.values(), other.values()) if isinstance(container, dict) else ()
    return all(
        one is another
        for pair in ((container, other), values)
        for one, another in zip(*pair, strict=True)
    )


def _holds_fakes(value: object) -> bool:
    with PassOver():
        return any(isinstance(tensor, FakeTensor) for tensor in tensors_in(value, most=_MAX_ITEMS))
    return False


def _objects(roots: Iterable[object]) -> Iterator[dict[str, Any]]:
    """The attributes of the user's own objects among some values and what they hold."""
    for value in islice(walk(roots, _held), _MAX_OBJECTS):
        own = _own_attributes(value)
        if own is not None:
            yield own


def _held(value: object) -> list[Any] | None:
    """What leads to objects: an object's attributes, a small container, a method, a closure."""
    kind = type(value)
    if kind in _CONTAINERS or kind is tuple:
        items: Any = value
        if len(items) > _MAX_HELD:
            return None
        return list(items.values() if isinstance(items, dict) else items)
    if kind is MethodType:
        return [value.__self__, value.__func__]  # type: ignore[attr-defined]
    if kind is FunctionType:
        return [*map(cell_contents, value.__closure__ or ())]  # type: ignore[attr-defined]
    own = _own_attributes(value)
    return None if own is None else [*islice(own.values(), _MAX_HELD)]


def _own_attributes(value: object) -> dict[str, Any] | None:
    """The `__dict__` of an object of the user's own classes; None for any other.

    No code of the user's runs.
    """
    kind = type(value)
    if not kind.__dictoffset__ or issubclass(kind, _NOT_OWN):
        return None
    own: object = None
    with PassOver():  # classes may have anything as `__module__` and `__dict__`
        if kind is not SimpleNamespace:
            file = vars(sys.modules[kind.__module__]).get("__file__")
            if file is not None and is_library(file):
                return None
        own = object.__getattribute__(value, "__dict__")
    return own if type(own) is dict else None
