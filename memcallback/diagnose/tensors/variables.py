"""Finds the tensors held by variables of the running program and by attributes of its modules.

No user code runs: containers and attributes are read past their classes' own methods. Tensors out
of reach have no owner.
"""

from __future__ import annotations

import dis
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from memcallback.core.by_class import by_class
from memcallback.core.code_lines import is_library
from memcallback.core.interruptions import PassOver
from memcallback.core.tensors import attributes

#: Limits of a search: levels of containers and objects, objects below one variable, objects in all.
_MAX_DEPTH = 4
_MAX_OBJECTS = 20_000
_MAX_OBJECTS_IN_ALL = 200_000
_LEAVES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    ModuleType,
    FunctionType,
    FrameType,
)
#: These are searched elsewhere: module_attributes, and the optimizers in live.py.
_SEARCHED_APART = (torch.nn.Module, torch.optim.Optimizer)
_PACKAGE = str(Path(__file__).parents[2])
#: What `call_after` adds to the variables of a frame.
_MARK = "_memcallback_mark"


def is_of_memcallback(filename: str) -> bool:
    """Whether a source file belongs to this package."""
    return filename.startswith(_PACKAGE)


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame, by name; empty if reading them would change the program.

    Or keep their values alive.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or sys.version_info >= (3, 13):
        values = dict(frame.f_locals)
        values.pop(_MARK, None)
        return values
    # Before Python 3.13 a function's f_locals is a dict that the frame keeps, with all values in
    # it, so we empty it again. Not under a debugger or profiler, where Python would write the empty
    # dict back to the variables.
    # A function that calls locals() has this same dict, and reading would put in what is new.
    is_watched = sys.gettrace() is not None or sys.getprofile() is not None
    if is_watched or _calls_locals(frame.f_code):
        return {}
    frame_locals = frame.f_locals
    values = dict(frame_locals)
    mark = values.pop(_MARK, None)
    # References: the frame's, ours and the argument's. With more, the program has the dict.
    if sys.getrefcount(frame_locals) <= 3:
        frame_locals.clear()
        if mark is not None:
            frame_locals[_MARK] = mark
    return values


def _calls_locals(code: CodeType) -> bool:
    return "locals" in code.co_names and any(
        step.opname == "LOAD_GLOBAL" and step.argval == "locals"
        for step in dis.get_instructions(code)
    )


class _Mark:
    """Lives as long as the frame that has it among its variables."""


def call_after(frame: FrameType, function: Callable[[], object]) -> weakref.finalize[..., Any]:
    """Call a function when a frame is gone: it has returned, or nobody keeps its error any more."""
    mark = _Mark()
    frame.f_locals[_MARK] = mark
    variables(frame)  # before Python 3.13 the line above keeps all values alive
    finalizer = weakref.finalize(mark, function)
    finalizer.atexit = False
    return finalizer


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The variables of a running function or of a file. It keeps their values alive.

    Attributes:
        values: By name.
        owner: The text for a variable as an owner, with `{}` for its name.
    """

    values: Mapping[str, object]
    owner: str


def scopes(frames: Iterable[FrameType]) -> list[Scope]:
    """The variables of frames, and the global ones of the user's files in which they run."""
    frames = [frame for frame in frames if not is_of_memcallback(frame.f_code.co_filename)]
    result: list[Scope] = []
    files = set()
    for frame in frames:
        code = frame.f_code
        file = Path(code.co_filename).name
        if code.co_name == "<module>":
            files.add(id(frame.f_globals))
            owner = f"variable '{{}}' in {file}"
        else:
            owner = f"local variable '{{}}' in {code.co_name}() of {file}"
        result.append(Scope(values=variables(frame), owner=owner))
    for frame in frames:
        filename = frame.f_code.co_filename
        if id(frame.f_globals) not in files and not is_library(filename):
            files.add(id(frame.f_globals))
            owner = f"variable '{{}}' in {Path(filename).name}"
            result.append(Scope(values=dict(frame.f_globals), owner=owner))
    return result


def scope_tensors(*searched: Scope) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield owner and tensor for variables, and for containers and objects in variables."""
    return _search(
        (scope.owner, name, value) for scope in searched for name, value in scope.values.items()
    )


def module_attributes(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield module name, owner and tensor for attributes other than parameters and buffers."""
    for name, module in model.named_modules():
        own = {
            key: value
            for key, value in attributes(module).items()
            if key not in ("_parameters", "_buffers", "_modules")
        }
        of = f"module {name!r}" if name else "the root module"
        owner = f"attribute '{{}}' of {of}"
        for path, tensor in _search((owner, attribute, value) for attribute, value in own.items()):
            yield name, path, tensor


def _search(roots: Iterable[tuple[str, str, object]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield owner and tensor for each root (owner, name, value), breadth first."""
    # By object id. An object shared by several roots, such as a logger, is searched again only if a
    # root is nearer to it.
    depth_of: dict[int, int] = {}
    for owner, name, value in roots:
        with PassOver():  # an object that cannot be read ends the search of its root only
            for path, tensor in _below(name, value, depth_of):
                yield owner.format(path), tensor


def _below(
    name: str, value: object, depth_of: dict[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and tensor below one root."""
    limit = min(len(depth_of) + _MAX_OBJECTS, _MAX_OBJECTS_IN_ALL)
    pending = deque([(name, value, 0)])
    while pending:
        path, obj, depth = pending.popleft()
        if issubclass(type(obj), torch.Tensor):
            yield path, obj  # type: ignore[misc]
            continue
        read = _reader_of(type(obj))
        if depth == _MAX_DEPTH or read is None:
            continue
        for attribute, child in read(obj):
            number = id(child)
            if depth_of.get(number, _MAX_DEPTH + 1) <= depth + 1 or not _reader_of(type(child)):
                continue
            if number not in depth_of and len(depth_of) >= limit:
                # Leave the rest to other roots that reach it.
                for rest_path, rest, _ in [(path, obj, depth), *pending]:
                    depth_of.pop(id(rest), None)
                    if issubclass(type(rest), torch.Tensor):
                        yield rest_path, rest  # type: ignore[misc]
                return
            depth_of[number] = depth + 1
            pending.append((f"{path}.{attribute}" if attribute else path, child, depth + 1))


_Read = Callable[[Any], Iterable[tuple[str, object]]]


@by_class
def _reader_of(kind: type) -> _Read | None:
    """What reads the objects that one of a class holds; None for one that is not searched."""
    if issubclass(kind, (*_LEAVES, *_SEARCHED_APART)):
        return None
    for container in (list, tuple, set, frozenset, deque):
        if issubclass(kind, container):
            return partial(_items, container.__iter__)
    return partial(_items, dict.values) if issubclass(kind, dict) else _attributes


def _items(read: Callable[[Any], Iterable[object]], obj: object) -> list[tuple[str, object]]:
    """The items of a container, with empty names.

    Its base class reads them, whatever a subclass does.
    """
    return [("", child) for child in islice(read(obj), _MAX_OBJECTS)]


def _attributes(obj: object) -> Iterable[tuple[str, object]]:
    return attributes(obj).items()
