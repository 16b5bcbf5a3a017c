"""What there is after a program, as text that can be compared: values, files, processes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing.queues
import os
import queue
import random
import re
import threading
import types
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from parts import COUNTS
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_LRU_CACHE = type(functools.lru_cache(lambda: None))
_NOT_VALUES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
#: What the callback writes, and what has the time of day in it.
_NOT_COMPARED = re.compile(
    r"lightning_logs/version_\d+/(events\.out\.|predicted(_low)?(/|$)|capacity(/|$)|memory\.html)"
    r"|(out/)?memcallback(/|$)"
)
#: matplotlib keeps the fonts open that it has drawn with.
_FONT = re.compile(r"/matplotlib/mpl-data/fonts/ttf/[^/]+$")


def digest(value, inside=()):
    """A value as text, or as lists and dictionaries of texts."""
    if id(value) in inside:
        return "itself"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, bytes):
        return f"bytes {_hash(value)}"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        content = np.ascontiguousarray(value).data  # not copied
        return f"{type(value).__name__} {value.dtype} {value.shape} {_hash(content)}"
    inside = (*inside, id(value))
    state = _state(value)
    if state is not None:
        return {type(value).__name__: digest(state, inside)}
    if isinstance(value, Mapping):
        return {str(key): digest(item, inside) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *(digest(item, inside) for item in value)]
    return f"an object {type(value).__name__}"


def _hash(data):
    return hashlib.blake2b(data).hexdigest()[:16]


def _tensor(value):
    about = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} on {value.device}"
    if value.grad_fn is not None:
        about += " with a graph"
    try:
        return f"{about} {_hash(value.detach().cpu().contiguous().numpy().tobytes())}"
    except (RuntimeError, TypeError) as error:
        return f"{about} {type(error).__name__}"


def _state(value):
    """What an object that counts, draws or keeps has in it; None for other objects."""
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, _LRU_CACHE):
        return repr(value.cache_info())
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        return "ended" if value.gi_frame is None else dict(value.gi_frame.f_locals)
    if isinstance(value, queue.Queue):
        return list(value.queue)
    if isinstance(value, multiprocessing.queues.Queue):
        return value.qsize()
    if hasattr(value, "get_lock") and hasattr(value, "value"):  # multiprocessing.Value
        return value.value
    if isinstance(value, torch.nn.Module):
        return {**value.state_dict(), **variables_of(value)}
    if isinstance(value, torch.optim.Optimizer):
        return value.state_dict()
    return None


def variables_of(holder):
    """The public variables of a file, a class or an object that are no functions or classes."""
    return {
        name: value
        for name, value in vars(holder).items()
        if not name.startswith("_") and not isinstance(value, _NOT_VALUES)
    }


def program_state(program):
    """The global variables of a program's file, and those of its classes."""
    state = digest(variables_of(program))
    for name, kind in vars(program).items():
        if isinstance(kind, type) and kind.__module__ == program.__name__:
            state[f"class {name}"] = digest(variables_of(kind))
    return state


def random_state():
    """The states of the generators that everybody shares."""
    state = {
        "random": _hash(repr(random.getstate()).encode()),
        "numpy": _hash(repr(np.random.get_state()).encode()),
        "torch": digest(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = digest(torch.cuda.get_rng_state_all())
    return state


def process_state():
    """What the process has open, what it started, how it is set, and how often its parts ran."""
    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    return {
        "ran": dict(COUNTS),
        "open files": open_files(),
        "processes": sorted(map(command_of, children_of(os.getpid()))),
        "threads": sorted(type(thread).__name__ for thread in threading.enumerate()),
        "modes": [type(mode).__name__ for mode in modes],
        "settings": [
            torch.is_grad_enabled(),
            str(torch.get_default_dtype()),
            torch.get_num_threads(),
            os.getcwd(),
            os.getpriority(os.PRIO_PROCESS, 0),
            _hash(repr(sorted(os.environ.items())).encode()),
        ],
    }


def open_files():
    """What the open descriptors of this process lead to, without numbers of pipes and sockets."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that listed them
            continue
        if not _FONT.search(target) and target != f"/proc/{os.getpid()}/fd":
            found.append(re.sub(r"\[\d+\]|(?<=/dev/shm/)\S+", "", target))
    return sorted(found)


def children_of(pid):
    """The processes that a process has started and that have not been waited for."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found += map(int, thread.read_text().split())
    return found


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "ended"


def files_in(folder):
    """The files of a folder, with what is in them, but for the callback's own."""
    return {
        name: _checkpoint(path) if path.suffix == ".ckpt" else _content(path)
        for path in sorted(folder.rglob("*"))
        if not _NOT_COMPARED.match(name := path.relative_to(folder).as_posix())
    }


def _content(path):
    if path.is_dir():
        return "a folder"
    if not path.is_file():
        return f"of mode {path.stat().st_mode:o}"
    return f"{path.stat().st_size} bytes {_hash(path.read_bytes())}"


def _checkpoint(path):
    """A checkpoint of Lightning's without the state of the callback, which has its place there."""
    held = torch.load(path, weights_only=False, map_location="cpu")
    held["callbacks"] = {
        name: state for name, state in held["callbacks"].items() if "Memory" not in name
    }
    return digest(held)
