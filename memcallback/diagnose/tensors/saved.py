"""What autograd saved, read from the graph.

Nothing is unpacked: a saved tensor with a hook (a checkpoint, `save_on_cpu`) may be computed or
copied again when it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

#: Whether PyTorch tells what it saved without unpacking it, as it does from version 2.11 on.
READS_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")
_RAW = "_raw_saved_"
#: From a parameter to the operator that takes it there are at most so many operators that save
#: nothing: a transposition, a cast.
_MOST_BETWEEN = 3
#: What a saved tensor was packed into is looked at for tensors, so deep.
_MOST_PACKED = 64


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A tensor that an autograd node holds.

    Attributes:
        tensor: The tensor.
        node: The node's name, such as `ConvolutionBackward0`.
        attribute: Under which name the code of a `torch.autograd.Function` keeps it; empty for what
            was saved for backward.
        module: The module whose own parameter the node's operator takes; None if there is none, or
            it is not sure.
    """

    tensor: torch.Tensor
    node: str
    attribute: str = ""
    module: str | None


def graph_nodes(roots: Iterable[Any]) -> list[Any]:
    """The autograd nodes that can be reached from some of them, in the order in which they were
    made.
    """
    pending = list(roots)
    found: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is None or node in found:
            continue
        found[node] = None
        try:
            pending.extend(following for following, _ in node.next_functions)
        except Exception:  # a node of an extension that has none
            continue
    return sorted(found, key=lambda node: int(node._sequence_nr()))


def saved_tensors(nodes: Iterable[Any], modules: Mapping[int, str | None]) -> Iterator[Saved]:
    """What autograd nodes hold. With PyTorch before 2.11, what a `torch.autograd.Function` keeps in
    attributes alone.
    """
    for node in nodes:
        try:
            name, module = node.name().rpartition("::")[2], _module_of(node, modules)
            kept = [
                (attribute, tensor)
                for attribute, value in getattr(node, "__dict__", {}).items()
                for tensor in _tensors(value)
            ]
        except Exception:
            continue
        for tensor in _saved_by(node):
            yield Saved(tensor=tensor, node=name, module=module)
        for attribute, tensor in kept:
            yield Saved(tensor=tensor, node=name, attribute=attribute, module=module)


@cache
def _saving_attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_RAW))


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    kind: type = type(node)
    for name in _saving_attributes(kind):
        with suppress(Exception):  # freed by a backward pass
            saved = getattr(node, name)
            for one in saved if isinstance(saved, tuple) else (saved,):
                yield from _tensors(getattr(one, "data", None))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """A tensor, or those in a tuple or list: what hooks pack a tensor into, and what a function
    keeps.
    """
    if issubclass(type(value), torch.Tensor):
        yield value  # type: ignore[misc]
    elif type(value) in (tuple, list):
        for item in value[:_MOST_PACKED]:  # type: ignore[index]
            if issubclass(type(item), torch.Tensor):
                yield item


def _module_of(node: Any, modules: Mapping[int, str | None]) -> str | None:
    """The module of the first parameter that the node's operator takes and that has one."""
    return next(
        (modules[number] for number in parameters_of(node) if modules.get(number) is not None), None
    )


def parameters_of(node: Any) -> Iterator[int]:
    """The ids of the parameters that reach a node's operator, directly or transposed or cast."""
    own = getattr(node, "variable", None)
    if own is not None:
        yield id(own)
    for following, _ in node.next_functions:
        for _ in range(_MOST_BETWEEN):
            if following is None:
                break
            variable = getattr(following, "variable", None)
            if variable is not None:
                yield id(variable)
                break
            kind: type = type(following)
            if len(following.next_functions) != 1 or _saving_attributes(kind):
                break
            following = following.next_functions[0][0]
