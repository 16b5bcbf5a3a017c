"""What a snapshot visits, and what it leaves alone because it is not the training's."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import queue
import random
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from typing import Any

import torch
from torch.utils.data import DataLoader

from memcallback.integrations.lightning.fit.iterators import MADE_AGAIN
from memcallback.integrations.lightning.fit.restores import WITH_STATE
from memcallback.integrations.lightning.fit.user_code import is_users_class, is_users_function

#: Other objects of the standard library belong to the interpreter or to other threads.
_PLAIN_DATA = (
    *(dict, list, set, deque, tuple, frozenset, UserDict, UserList, ChainMap),
    *(types.SimpleNamespace, argparse.Namespace, functools.partial, random.Random),
    *(types.FunctionType, types.MethodType, types.CellType, queue.Queue, threading.local),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
LRU_CACHE: Any = type(functools.lru_cache(len))
#: What these hold is visited, and they themselves do not change.
HOLDERS = (
    *(staticmethod, classmethod, property, functools.cached_property, functools.partialmethod),
    *(types.MappingProxyType, types.MethodWrapperType, types.BuiltinMethodType),
)
#: Objects of these packages write to files, screens or the network, are compiled code, or belong to
#: the program around the training: a notebook, a debugger, a test.
_FOREIGN = (
    *("tensorboard", "tensorboardX", "wandb", "mlflow", "neptune", "comet_ml", "rich", "tqdm"),
    *("IPython", "ipykernel", "ipywidgets", "traitlets", "zmq", "tornado", "matplotlib"),
    *("debugpy", "pytest", "_pytest", "pluggy", "hypothesis"),
)
_FOREIGN_MODULES = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx",
    "torch.distributed",
    "torch.utils.tensorboard",
)
#: Iterators in these packages' objects are those of a loop, which each trial makes anew.
_LOOPS = ("lightning", "pytorch_lightning", "torch.utils.data")
_ATOMS = (
    *(str, bytes, int, float, complex, type(None), range, slice),
    *(types.ModuleType, types.CodeType, types.FrameType, types.TracebackType),
    *(weakref.ref, weakref.ProxyType, weakref.CallableProxyType),
    *(torch.dtype, torch.device, torch.layout),
)


def holds_users_iterators(obj: object, *, is_owner_users: bool) -> bool:
    """Whether iterators in an object's attributes are the user's, not those of a loop."""
    if isinstance(obj, DataLoader):
        return False
    if is_users_class(type(obj)):
        return True
    return is_owner_users and not type(obj).__module__.startswith(_LOOPS)


def is_left_alone(obj: object) -> bool:
    """Whether an object is not saved, nor what it holds; an instance of `may_be_visited`."""
    if isinstance(obj, type):
        return not is_users_class(obj)
    if isinstance(obj, (queue.Queue, queue.SimpleQueue)):
        return _has_threads_of_the_users()
    return isinstance(obj, LRU_CACHE) and not is_users_function(_innermost(obj))


def _has_threads_of_the_users() -> bool:
    """Whether threads of the user's run, which count what they take from a queue."""
    targets = (getattr(thread, "_target", None) for thread in threading.enumerate())
    functions = (getattr(target, "__func__", target) for target in targets)
    return any(is_users_class(type(thread)) for thread in threading.enumerate()) or any(
        isinstance(function, types.FunctionType) and is_users_function(function)
        for function in functions
    )


def may_be_visited(kind: type) -> bool:
    """Whether objects of a class are saved; slow, so ask once for each class."""
    if issubclass(kind, type):
        return True
    if issubclass(kind, _ATOMS):
        return False
    if is_users_class(kind):
        return True
    if is_foreign(kind):
        return issubclass(kind, torch.nn.Module)
    name = kind.__module__
    first = name.partition(".")[0]
    if first == "memcallback" and dataclasses.is_dataclass(kind):  # results, which are frozen
        return False
    if issubclass(kind, (*_PLAIN_DATA, *HOLDERS, *WITH_STATE, LRU_CACHE)):
        return True
    if hasattr(kind, "__next__"):
        # Not restored but replaced in a trial; what one of Python's own goes through is restored.
        return name in MADE_AGAIN and kind is not types.GeneratorType
    return first not in sys.stdlib_module_names


def is_foreign(kind: type) -> bool:
    """Whether a class is of a package whose objects are not the training's."""
    name = kind.__module__
    return name.partition(".")[0] in _FOREIGN or name.startswith(_FOREIGN_MODULES)


def _innermost(function: Any) -> Any:
    while not isinstance(function, types.FunctionType):
        function = function.__wrapped__
    return function
