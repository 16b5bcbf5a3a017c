"""Questions about a model: its containers of layers, its devices, whether it is sharded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import TypeGuard

import torch
from torch import nn

from memcallback.core.errors import warn_and_go_on
from memcallback.core.torch_private import is_traceable_wrapper_subclass

#: If one child has more than this share of a container's layers, we look inside that child.
_DOMINANT_SHARE = 0.75
#: Wrappers and the attribute that holds the wrapped model, which has its own module names.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
#: How many names an error lists.
_NUM_LISTED = 8


def is_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module runs its children one after the other and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def module_named(root: nn.Module, name: str) -> nn.Module:
    """The module with a name; the empty name is the root's."""
    modules: dict[str, nn.Module] = dict(root.named_modules())
    if name in modules:
        return modules[name]
    closest = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
    hint = f"Closest are {listed(closest)}." if closest else f"It has {listed(modules)}."
    raise ValueError(f"{type(root).__name__} has no module named {name!r}. {hint}")


def layer_containers(root: nn.Module) -> list[str]:
    """Names of the outermost `nn.Sequential`s of several layers and `nn.ModuleList`s of blocks."""
    names = _containers(root, "")
    if not names:
        modules = listed(name for name, _ in root.named_modules()) or "none"
        raise ValueError(
            f"{type(root).__name__} has no nn.Sequential of several layers and no nn.ModuleList of "
            "several blocks. Name the modules to checkpoint, each as one block: name=[...]. "
            f"The model's modules: {modules}."
        )
    return names


def _containers(module: nn.Module, name: str) -> list[str]:
    children = [
        (child, f"{name}.{child_name}".lstrip(".")) for child_name, child in module.named_children()
    ]
    if not _is_container(module):
        return [inner for child, child_name in children for inner in _containers(child, child_name)]
    num_layers = _num_layers(module)
    for child, child_name in children:
        if _num_layers(child) > _DOMINANT_SHARE * num_layers and (
            inner := _containers(child, child_name)
        ):
            return inner
    return [name]


def _is_container(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 1 and has_blocks(module)
    return is_sequential(module) and len(module) > 1


def _num_layers(module: nn.Module) -> int:
    return sum(not any(part.children()) for part in module.modules())


def has_blocks(module: nn.Module) -> bool:
    """Whether a child of the module has children of its own."""
    return any(True for child in module.children() for _ in child.children())


def segment_starts(module: nn.Sequential, name: str, segments: int | None) -> list[int]:
    """The positions at which the segments of an `nn.Sequential` begin.

    No segment begins with a layer that works in place, which would change the segment's input. So
    there may be fewer segments than requested, and the first may begin later than the first layer.
    """
    layers, least = list(module), 1 if name else 2
    if segments is None:
        segments = len(layers) if has_blocks(module) else max(least, round(len(layers) ** 0.5))
    if isinstance(segments, bool) or not hasattr(segments, "__index__"):
        raise TypeError(
            f"segments={segments!r} for {name or 'the model'!r} must be a whole number. "
            "Leave it out to have it chosen."
        )
    if not least <= segments <= len(layers):
        reason = "" if name else " (the last one is not checkpointed)"
        raise ValueError(
            f"segments={segments} for {name or 'the model'!r} must be at least {least}{reason} and "
            f"at most {len(layers)}, the number of layers. Leave it out to have it chosen."
        )
    first = {_out_of_place(layers, number * len(layers) // segments) for number in range(segments)}
    return sorted(first - {len(layers)})


def _out_of_place(layers: list[nn.Module], position: int) -> int:
    """The first position from here on whose layer does not begin by working in place."""
    while position < len(layers) and _begins_in_place(layers[position]):
        position += 1
    return position


def _begins_in_place(layer: nn.Module) -> bool:
    while is_sequential(layer) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))


def listed(names: Iterable[str]) -> str:
    """The first names, in quotes."""
    quoted = [repr(name) for name in names if name]
    return ", ".join(quoted[:_NUM_LISTED]) + (", ..." if len(quoted) > _NUM_LISTED else "")


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are spread over several devices by FSDP or as DTensors."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return True
    return any(is_traceable_wrapper_subclass(parameter) for parameter in model.parameters())


def unwrapping(model: nn.Module) -> Iterator[nn.Module]:
    """A model and, if it is a wrapper, what it wraps."""
    yield model
    while type(model).__name__ in _WRAPPERS:
        model = getattr(model, _WRAPPERS[type(model).__name__])
        yield model


def devices_of(model: nn.Module) -> list[str]:
    """The devices of a model's parameters."""
    return sorted({str(parameter.device) for parameter in model.parameters()})


def warn_of_devices(model: nn.Module, device: torch.device) -> None:
    """Warn that a model is on several devices, only one of which is recorded."""
    devices = devices_of(model)
    if len(devices) > 1:
        warn_and_go_on(
            f"The model's parameters are on {len(devices)} devices ({', '.join(devices)}); only "
            f"the memory of {device} is recorded, and the prediction counts only the parameters "
            "there. Record the others with a MemoryRecorder(device=...) each."
        )
