"""Who owns what grows, and which line appends to it."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from memcallback.core.code_lines import is_library
from memcallback.core.types import Category
from memcallback.diagnose.tensors.live import alive_tensors, live_storages
from memcallback.diagnose.tensors.saved import graph_nodes
from memcallback.diagnose.tensors.variables import (
    Scope,
    is_of_memcallback,
    module_attributes,
    scope_tensors,
    scopes,
    stack,
)
from memcallback.prediction.allocator.settings import AllocatorSettings

#: Methods with which a container takes something.
_TAKING = frozenset(
    {"append", "appendleft", "extend", "extendleft", "add", "insert", "put", "update", "setdefault"}
)


def filling_lines(
    name: str, paths: Iterable[str], *, within: Iterable[tuple[str, int, int]] | None = None
) -> list[str]:
    """Find the lines that fill a container or add to a value."""
    last = name.rpartition(".")[2]
    found: list[str] = []
    parts = None if within is None else list(within)
    for path in dict.fromkeys(paths):
        numbers = sorted(
            {
                line
                for line, target in _fillings("".join(linecache.getlines(path)))
                if target == last
            }
        )
        if parts is not None:
            numbers = [
                number
                for number in numbers
                if any(file == path and first <= number <= end for file, first, end in parts)
            ]
        found += [
            f"{Path(path).name}:{number}: {linecache.getline(path, number).strip()}"
            for number in numbers
        ]
    return found


@cache
def _fillings(source: str) -> tuple[tuple[int, str], ...]:
    """The lines in which something is put into a name, with that name."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        target: ast.expr | None = None
        line = getattr(node, "lineno", 0)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _TAKING
        ):
            target = node.func.value
        elif isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Assign):
            # `cache[key] = value`; `total = total + loss` and `cache = torch.cat([cache, new])`,
            # which take the name itself.
            of_itself = [
                one
                for one in node.targets
                if _name(one) in {_name(part) for part in ast.walk(node.value)} - {""}
            ]
            target = next(
                (one for one in node.targets if isinstance(one, ast.Subscript)), None
            ) or next(iter(of_itself), None)
        if target is not None and (name := _name(target)):
            found.append((line, name))
    return tuple(found)


def _name(node: ast.AST) -> str:
    """The variable or attribute of an expression such as `losses`, `self.losses`,
    `self.losses["train"]`.
    """
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


#: Owners whose tensors' graphs are looked at, at most.
_MOST_OWNERS = 50
_NUM_LINES = 2


@dataclass(frozen=True, kw_only=True)
class Held:
    """The storages of one owner at one moment.

    Attributes:
        owner: As `LiveTensor.owner`; empty for those of which nobody is known.
        count: How many.
        num_bytes: Of all together; on an accelerator as its allocator rounds them.
        shape: Of the most frequent kind.
        dtype: Of that kind.
        keeps_graph: Whether one of them was computed with gradients, or was saved for a backward
            pass.
    """

    owner: str
    count: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    keeps_graph: bool


@dataclass(frozen=True, kw_only=True)
class Holding:
    """All that is alive on a device at one moment, without the batch; it holds no tensor.

    Attributes:
        step: After which step.
        by_owner: The storages of each owner.
        graphs: How many of autograd's operations are behind the tensor of a variable or attribute
            (of several, the last), by owner.
    """

    step: int
    by_owner: dict[str, Held]
    graphs: dict[str, int]

    @property
    def owned_bytes(self) -> int:
        """Of the storages that somebody holds; others may be garbage that Python has not collected
        yet.
        """
        return sum(held.num_bytes for held in self.by_owner.values() if _is_held(held.owner))

    @property
    def num_owned(self) -> int:
        """The number of these storages."""
        return sum(held.count for held in self.by_owner.values() if _is_held(held.owner))


def _is_held(owner: str) -> bool:
    return owner != "" and not owner.startswith("output of ")


def frames_around() -> list[FrameType]:
    """The functions that run, from the inside out: the user's first, so that their variables give
    the names.
    """
    # Those of this package would hold the list that holds them, and with it the batch, until Python
    # collects such cycles.
    found = [
        frame
        for frame in stack(sys._getframe(1))
        if not is_of_memcallback(frame.f_code.co_filename)
    ]
    return sorted(found, key=lambda one: is_library(one.f_code.co_filename))


def holding(
    step: int,
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    batch: object,
    device: torch.device,
    frames: Iterable[FrameType],
) -> Holding:
    """What is alive on a device now. Nothing is allocated there, and nothing is kept alive."""
    modules, frames = list(modules), list(frames)
    tensors = alive_tensors()
    found = live_storages(modules, optimizers, batch, device, frames=frames, others=tensors)
    global_tensors = list(_global_tensors())
    with_graph, in_files = _with_graph(tensors), _owners(global_tensors)
    settings = AllocatorSettings()
    groups: dict[str, list[tuple[int, tuple[tuple[int, ...], str], bool]]] = {}
    for live, reference in found:
        storage = reference()
        if storage is None or live.category is Category.INPUT:
            continue
        owner = live.owner if is_named(live.owner) else in_files.get(storage._cdata, live.owner)
        size = live.size_bytes if device.type == "cpu" else settings.block_bytes(live.size_bytes)
        keeps_graph = live.category is Category.ACTIVATION or storage._cdata in with_graph
        groups.setdefault(owner, []).append((size, (live.shape, live.dtype), keeps_graph))
    by_owner = {owner: _held(owner, storages) for owner, storages in groups.items()}
    return Holding(step=step, by_owner=by_owner, graphs=_graphs(modules, frames, global_tensors))


def is_named(owner: str) -> bool:
    """Whether an owner is a variable or an attribute of the user's program."""
    return "'" in owner and not owner.startswith("attribute 'saved") and "Backward" not in owner


def _held(owner: str, storages: Sequence[tuple[int, tuple[tuple[int, ...], str], bool]]) -> Held:
    (shape, dtype), _ = Counter(kind for _, kind, _ in storages).most_common(1)[0]
    return Held(
        owner=owner,
        count=len(storages),
        num_bytes=sum(size for size, _, _ in storages),
        shape=shape,
        dtype=dtype,
        keeps_graph=any(keeps_graph for _, _, keeps_graph in storages),
    )


def _with_graph(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of those that autograd computed, by identity."""
    found = set()
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            with suppress(Exception):
                base: Any = tensor._base if tensor._is_view() else tensor
                if base.grad_fn is not None:
                    found.add(base.untyped_storage()._cdata)
    return found


@dataclass(frozen=True, kw_only=True)
class Grown:
    """What of an owner has become more.

    Attributes:
        held: What it holds now.
        count: Storages more; 0 where those that it had have become larger.
        num_bytes: Bytes more, above 0.
    """

    held: Held
    count: int
    num_bytes: int


def grown(holdings: Sequence[Holding]) -> list[Grown]:
    """The owners whose storages have become more, or larger and not fewer, from each moment to the
    next; what grew the most first.
    """
    first, last = holdings[0], holdings[-1]
    found = []
    for owner, held in last.by_owner.items():
        series = [one.by_owner.get(owner) for one in holdings]
        counts = [0 if one is None else one.count for one in series]
        sizes = [0 if one is None else one.num_bytes for one in series]
        steps = list(zip(counts, sizes, strict=True))
        if all(after[1] > before[1] and after[0] >= before[0] for before, after in pairwise(steps)):
            before = first.by_owner.get(owner)
            found.append(
                Grown(
                    held=held,
                    count=held.count - (before.count if before else 0),
                    num_bytes=held.num_bytes - (before.num_bytes if before else 0),
                )
            )
    return sorted(found, key=lambda one: (one.num_bytes, one.count), reverse=True)


def growing_graph(holdings: Sequence[Holding]) -> str:
    """The variable or attribute behind whose tensor there are more of autograd's operations from
    each moment to the next; empty for none.
    """
    last = holdings[-1].graphs
    growing = [
        owner
        for owner in last
        if all(
            after.graphs[owner] > before.graphs.get(owner, after.graphs[owner])
            for before, after in pairwise(holdings)
            if owner in after.graphs
        )
    ]
    return max(growing, key=lambda owner: last[owner], default="")


def _graphs(
    modules: Iterable[torch.nn.Module],
    frames: Iterable[FrameType],
    global_tensors: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, int]:
    named: dict[str, torch.Tensor] = {}
    for model in modules:
        with suppress(Exception):
            named.update(
                (owner, tensor)
                for _, owner, tensor in module_attributes(model)
                if tensor.requires_grad
            )
    for held in [*map(scope_tensors, scopes(frames)), global_tensors]:
        with suppress(Exception):
            named.update((owner, tensor) for owner, tensor in held if tensor.requires_grad)
    sizes = {}
    for owner, tensor in list(named.items())[:_MOST_OWNERS]:
        with suppress(Exception), torch._C.DisableTorchFunctionSubclass():
            base: Any = tensor._base if tensor._is_view() else tensor
            if base.grad_fn is not None:
                sizes[owner] = len(graph_nodes([base.grad_fn]))
    return sizes


def _global_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """What global variables of the user's files hold, with their owners."""
    with suppress(Exception):
        yield from scope_tensors(
            *(
                Scope(values=dict(vars(module)), owner=f"variable '{{}}' in {Path(file).name}")
                for module, file in _user_modules()
            )
        )


def _owners(owned: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """The owners of storages, by the storage's identity."""
    found: dict[int, str] = {}
    for owner, tensor in owned:
        with suppress(Exception):
            found.setdefault(tensor.untyped_storage()._cdata, owner)
    return found


def _user_modules() -> Iterator[tuple[Any, str]]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and not is_library(file) and not is_of_memcallback(file):
            yield module, file


def filled_at(
    owner: str, modules: Iterable[torch.nn.Module], frames: Iterable[FrameType]
) -> tuple[str, ...]:
    """The lines of the user's program that put something into a variable or an attribute."""
    name = re.search(r"'([^']+)'", owner)
    if name is None:
        return ()
    files = [frame.f_code.co_filename for frame in frames]
    files += [file for _, file in _user_modules()]
    files = [
        file
        for file in dict.fromkeys(files)
        if not is_library(file) and not is_of_memcallback(file)
    ]
    if owner.startswith("attribute"):
        parts = {kind for model in modules for kind in map(type, model.modules())}
        lines = [
            line for kind in parts for line in filling_lines(name[1], files, within=_codes(kind))
        ]
        if lines:
            return tuple(sorted(set(lines)))[:_NUM_LINES]
    of_file = re.search(r" (?:of|in) (\S+\.py)$", owner)
    named = [file for file in files if of_file is not None and Path(file).name == of_file[1]]
    return tuple((filling_lines(name[1], named) or filling_lines(name[1], files))[:_NUM_LINES])


def _codes(kind: type) -> list[tuple[str, int, int]]:
    """The file, the first and the last line of each function that a class has, inherited ones too."""
    found = []
    for name in dir(kind):
        code = getattr(inspect.getattr_static(kind, name, None), "__code__", None)
        if code is not None and not is_library(code.co_filename):
            lines = [
                line for one in _nested(code) for _, _, line in one.co_lines() if line is not None
            ]
            found.append((code.co_filename, min(lines), max(lines)))
    return found


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
