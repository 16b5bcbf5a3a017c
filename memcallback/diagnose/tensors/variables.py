"""Tensors held by variables in the program's frames.

Nothing of the user's runs: objects are looked at without asking them, and what is not looked at has
no name.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from memcallback.core.code_lines import is_library
from memcallback.core.tensors import attributes

#: How deep containers and objects are searched for tensors, how many of them below one variable,
#: and in one search.
_MOST_DEPTH = 4
_MOST_OBJECTS = 20_000
_MOST_IN_ALL = 200_000
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
_SEARCHED_APART = (torch.nn.Module, torch.optim.Optimizer)
_OWN = str(Path(__file__).parents[2])


def is_of_memcallback(filename: str) -> bool:
    """Whether a source file is one of this package."""
    return filename.startswith(_OWN)


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, from the inside out."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame, by name; none where reading them would keep what they hold alive.

    Before Python 3.13 `f_locals` of a function is a dict that the frame keeps, with all that is in
    it. It is emptied again, unless a debugger is tracing: Python would write the emptied dict back
    into the function's variables. A dict that the program has from its own `locals()` is the same
    one: it then has the variables of this moment.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or sys.version_info >= (3, 13):
        return dict(frame.f_locals)
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return {}
    kept = frame.f_locals
    found = dict(kept)
    # The frame's own reference, ours and that of the argument: with more, the program has asked for
    # its locals() itself.
    if sys.getrefcount(kept) <= 3:
        kept.clear()
    return found


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The variables of one function that runs, or of a file; it holds what they hold.

    Attributes:
        values: By name.
        owner: How a variable is called, with `{}` for its name.
    """

    values: Mapping[str, object]
    owner: str


def scopes(frames: Iterable[FrameType]) -> list[Scope]:
    """The variables of frames, and the global ones of the user's files that these run in."""
    frames = [frame for frame in frames if not is_of_memcallback(frame.f_code.co_filename)]
    found, files = [], set()
    for frame in frames:
        code = frame.f_code
        if code.co_name == "<module>":
            files.add(id(frame.f_globals))
            owner = f"variable '{{}}' in {Path(code.co_filename).name}"
        else:
            owner = f"local variable '{{}}' in {code.co_name}() of {Path(code.co_filename).name}"
        found.append(Scope(values=variables(frame), owner=owner))
    for frame in frames:
        filename = frame.f_code.co_filename
        if id(frame.f_globals) not in files and not is_library(filename):
            files.add(id(frame.f_globals))
            found.append(
                Scope(
                    values=dict(frame.f_globals), owner=f"variable '{{}}' in {Path(filename).name}"
                )
            )
    return found


def scope_tensors(*searched: Scope) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that variables hold, themselves or in containers and objects, with the name of the
    owner.
    """
    return _search(
        (scope.owner, name, value) for scope in searched for name, value in scope.values.items()
    )


def module_attributes(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Tensors in attributes of a model's modules that are neither parameters nor buffers, with the
    names of module and owner.
    """
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
    """The tensors in containers and objects, of each root the nearest first, with their owner's
    name.

    What several roots lead to, such as the loggers of a program, is looked at again only where a
    root is nearer to it.
    """
    depth_of: dict[int, int] = {}
    for owner, name, value in roots:
        with suppress(
            Exception
        ):  # of whatever is in a person's objects, the other roots are looked at
            for path, tensor in _below(name, value, depth_of):
                yield owner.format(path), tensor


def _below(
    name: str, value: object, depth_of: dict[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors below one root."""
    most = min(len(depth_of) + _MOST_OBJECTS, _MOST_IN_ALL)
    pending = deque([(name, value, 0)])
    while pending:
        path, obj, depth = pending.popleft()
        if issubclass(type(obj), torch.Tensor):
            yield path, obj  # type: ignore[misc]
            continue
        if depth == _MOST_DEPTH or _is_leaf(obj):
            continue
        for attribute, child in _children(obj):
            number = id(child)
            if _is_leaf(child) or depth_of.get(number, _MOST_DEPTH + 1) <= depth + 1:
                continue
            if number not in depth_of and len(depth_of) >= most:
                # Of what is left out here, other roots may see to some.
                for left_path, left, _ in [(path, obj, depth), *pending]:
                    depth_of.pop(id(left), None)
                    if issubclass(type(left), torch.Tensor):
                        yield left_path, left  # type: ignore[misc]
                return
            depth_of[number] = depth + 1
            pending.append((f"{path}.{attribute}" if attribute else path, child, depth + 1))


def _is_leaf(obj: object) -> bool:
    return issubclass(type(obj), (*_LEAVES, *_SEARCHED_APART))


def _children(obj: object) -> list[tuple[str, object]]:
    """What a container holds, with empty names, or an object in its attributes; read past whatever
    its class makes of that.
    """
    held: Any = obj
    for container in (list, tuple, set, frozenset, deque):
        if issubclass(type(obj), container):
            return [("", child) for child in islice(container.__iter__(held), _MOST_OBJECTS)]
    if issubclass(type(obj), dict):
        return [("", child) for child in islice(dict.values(held), _MOST_OBJECTS)]
    return list(attributes(obj).items())
