"""Find a model's layers (blocks of ModuleLists, Sequentials)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeGuard

from torch import nn

#: Of a container that has more than this share of its layers in one child, what is in that child is
#: taken instead.
_DOMINANT_SHARE = 0.75
#: Of the names that an error lists.
_NUM_LISTED = 8


def is_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module runs its children one after the other and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def named(root: nn.Module, name: str) -> nn.Module:
    """The module of that name; the empty name is the model's own."""
    modules: dict[str, nn.Module] = dict(root.named_modules())
    if name in modules:
        return modules[name]
    closest = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
    there = f"Closest are {listed(closest)}." if closest else f"It has {listed(modules)}."
    raise ValueError(f"{type(root).__name__} has no module named {name!r}. {there}")


def found(root: nn.Module) -> list[str]:
    """The names of the outermost `nn.Sequential`s of several layers and `nn.ModuleList`s of several
    blocks.
    """
    names = _found(root, "")
    if not names:
        raise ValueError(
            f"{type(root).__name__} has no nn.Sequential of several layers and no nn.ModuleList of several blocks. Name the modules to "
            f"checkpoint, each as one block: name=[...]. It has {listed(name for name, _ in root.named_modules()) or 'none'}."
        )
    return names


def _found(module: nn.Module, name: str) -> list[str]:
    children = [
        (child, f"{name}.{child_name}".lstrip(".")) for child_name, child in module.named_children()
    ]
    if not _is_container(module):
        return [one for child, child_name in children for one in _found(child, child_name)]
    num_layers = _num_layers(module)
    for child, child_name in children:
        if _num_layers(child) > _DOMINANT_SHARE * num_layers and (
            inner := _found(child, child_name)
        ):
            return inner
    return [name]


def _is_container(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 1 and has_blocks(module)
    return is_sequential(module) and len(module) > 1


def _num_layers(module: nn.Module) -> int:
    return sum(not any(one.children()) for one in module.modules())


def has_blocks(module: nn.Module) -> bool:
    """Whether a child of the module has children of its own."""
    return any(True for child in module.children() for _ in child.children())


def starts(module: nn.Sequential, name: str, segments: int | None) -> list[int]:
    """Where the segments of an `nn.Sequential` begin.

    None begins with a layer that works in place: that would change the segment's input. So there
    may be fewer than asked for, and the first may begin later than the first layer.
    """
    layers, least = list(module), 1 if name else 2
    if segments is None:
        segments = len(layers) if has_blocks(module) else max(least, round(len(layers) ** 0.5))
    if isinstance(segments, bool) or not hasattr(segments, "__index__"):
        raise TypeError(
            f"segments={segments!r} for {name or 'the model'!r} must be a whole number. Leave it out to have it chosen."
        )
    if not least <= segments <= len(layers):
        raise ValueError(
            f"segments={segments} for {name or 'the model'!r}, whose number of layers is {len(layers)}: it must be at least {least}"
            f"{'' if name else ' (the last one is not checkpointed)'} and at most as many. Leave it out to have it chosen."
        )
    first = {_out_of_place(layers, number * len(layers) // segments) for number in range(segments)}
    return sorted(first - {len(layers)})


def _out_of_place(layers: list[nn.Module], position: int) -> int:
    """The first position from this one on where a layer does not begin by working in place."""
    while position < len(layers) and _begins_in_place(layers[position]):
        position += 1
    return position


def _begins_in_place(layer: nn.Module) -> bool:
    while is_sequential(layer) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))


def listed(names: Iterable[str]) -> str:
    """The first names, in quotes."""
    every = [repr(name) for name in names if name]
    return ", ".join(every[:_NUM_LISTED]) + (", ..." if len(every) > _NUM_LISTED else "")
