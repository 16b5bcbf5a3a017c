"""Reads the tensors that autograd saved from its graph.

Nothing is unpacked, since unpacking may recompute or copy a tensor (checkpointing, `save_on_cpu`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from memcallback.core.interruptions import PassOver, raise_if_meant
from memcallback.core.torch_private import SavedTensor, sequence_nr

#: Whether saved tensors can be read without unpacking them, as from PyTorch 2.11 on.
READS_SAVED = hasattr(SavedTensor, "data")
_RAW = "_raw_saved_"
#: Operators that save nothing (a transpose, a cast) between a parameter and its operator, at most.
_MAX_BETWEEN = 3
#: Items to read of a tuple or list that a saved tensor was packed into.
_MAX_PACKED = 64


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A tensor that an autograd node keeps alive.

    Attributes:
        tensor: The tensor.
        node: The node's name, such as `ConvolutionBackward0`.
        attribute: The attribute in which a `torch.autograd.Function` keeps it; empty for a tensor
            saved for backward.
        module: The module with the parameter of the node's operator; None if none or unsure.
    """

    tensor: torch.Tensor
    node: str
    attribute: str = ""
    module: str | None


def graph_nodes(roots: Iterable[Any]) -> list[Any]:
    """All autograd nodes reachable from `roots`, in order of creation."""
    pending = list(roots)
    nodes: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        nodes[node] = None
        try:
            pending.extend(following for following, _ in node.next_functions)
        except Exception as error:  # an extension's node without next_functions
            raise_if_meant(error)
            continue
    return sorted(nodes, key=lambda node: int(sequence_nr(node)))


def saved_tensors(nodes: Iterable[Any], modules: Mapping[int, str | None]) -> Iterator[Saved]:
    """The tensors that nodes keep alive; before PyTorch 2.11 only attributes of Functions."""
    for node in nodes:
        try:
            name, module = node.name().rpartition("::")[2], _module_of(node, modules)
            kept = [
                (attribute, tensor)
                for attribute, value in getattr(node, "__dict__", {}).items()
                for tensor in _tensors(value)
            ]
        except Exception as error:  # an extension's node, or a value in it that cannot be read
            raise_if_meant(error)
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
        with PassOver():  # freed by a backward pass
            value = getattr(node, name)
            for saved in value if isinstance(value, tuple) else (value,):
                yield from _tensors(getattr(saved, "data", None))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """A tensor, or those in a tuple or list, such as hooks pack tensors into."""
    if issubclass(type(value), torch.Tensor):
        yield value  # type: ignore[misc]
    elif type(value) in (tuple, list):
        for item in value[:_MAX_PACKED]:  # type: ignore[index]
            if issubclass(type(item), torch.Tensor):
                yield item


def _module_of(node: Any, modules: Mapping[int, str | None]) -> str | None:
    """The module of the first parameter of the node's operator that belongs to one."""
    return next(
        (modules[number] for number in parameters_of(node) if modules.get(number) is not None), None
    )


def parameters_of(node: Any) -> Iterator[int]:
    """The ids of parameters that a node's operator uses, directly or transposed or cast."""
    own = getattr(node, "variable", None)
    if own is not None:
        yield id(own)
    for following, _ in node.next_functions:
        for _ in range(_MAX_BETWEEN):
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
