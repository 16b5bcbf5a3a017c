"""What a step has on the device beside its model: a teacher, an average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from memcallback.core.tensors import attributes, is_wrapper, tensors_in, walk
from memcallback.core.validation import described
from memcallback.step.copies.functions import (
    contents_of,
    functions_of,
    named_outer_variables,
    owner_of,
)

#: What `TrainingStep` takes as `also`.
AlsoOption = Sequence[object] | Mapping[str, object] | None
_GIVE = (
    "Give a list of modules, or of containers of tensors, that are on the device beside the model: "
    "also=[average]. A mapping gives them names: also={'average': average}."
)


def check_also(also: object) -> dict[str, Any]:
    """Check that `also` holds modules, or what has tensors in it; return them by name."""
    if also is None:
        return {}
    if isinstance(also, Mapping):
        named = {str(name): item for name, item in also.items()}
    elif isinstance(also, Sequence) and not isinstance(also, (str, bytes, nn.Module)):
        named = {f"also[{number}]": item for number, item in enumerate(also)}
    else:
        raise TypeError(f"also must be a list, got {described(also)}. {_GIVE}")
    for name, item in named.items():
        if next(tensors_of(item), None) is None:
            raise TypeError(f"{name} is {described(item)}, with no tensor in it. {_GIVE}")
    return named


def beside(
    model: nn.Module, functions: Iterable[object], also: Mapping[str, object]
) -> dict[str, Any]:
    """What is on the device beside a model, by name: what was said, and what functions reach.

    Functions reach a module by a variable, and so do the model's hooks; the model may also hide one
    in a list, where it is no part of it.
    """
    tensors = {id(tensor) for tensor in tensors_of(model)}
    modules = {id(part) for part in model.modules()}
    found: dict[str, Any] = {}

    def add(name: str, item: object) -> None:
        if isinstance(item, nn.Module):
            modules.update(map(id, item.modules()))
        if new := {id(tensor) for tensor in tensors_of(item)} - tensors:
            tensors.update(new)
            found[new_name(name, found)] = item

    for name, item in also.items():
        add(name, item)
    for name, module in _modules_in(_variables(model, functions)):
        if id(module) not in modules:
            add(name, module)
    return found


def modules_reached(model: nn.Module, functions: Iterable[object]) -> dict[str, nn.Module]:
    """The modules other than the model's that functions reach by a variable, by its name."""
    own = {id(part) for part in model.modules()}
    found: dict[str, nn.Module] = {}
    for name, module in _modules_in(_outer_variables([], [*functions])):
        if id(module) not in own:
            own.update(map(id, module.modules()))
            found[new_name(name, found)] = module
    return found


def tensors_reached(model: nn.Module, functions: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors that functions and a model's hooks reach by a variable, those of modules too."""
    for _, value in _variables(model, functions):
        for item in walk([value], _parts):
            if isinstance(item, nn.Module):
                yield from tensors_of(item)
            elif isinstance(item, torch.Tensor):
                yield item


def plain_tensors(model: nn.Module, *, on_host: bool) -> dict[str, list[torch.Tensor]]:
    """Tensors on the host, or on a device, in plain attributes of modules, by the module's name.

    They are neither parameters nor buffers, and stay where they are as the model moves.
    """
    own = {id(tensor) for tensor in tensors_of(model)}
    found = {
        name: [
            tensor
            for item in walk(_plain_attributes(module).values(), _parts)
            if isinstance(tensor := item, torch.Tensor)
            and id(tensor) not in own
            and tensor.device.type != "meta"
            and (tensor.device.type == "cpu") == on_host
        ]
        for name, module in model.named_modules()
    }
    return {name: tensors for name, tensors in found.items() if tensors}


def modules_held_by(owners: Iterable[object]) -> dict[str, nn.Module]:
    """The modules in the attributes of some objects, such as the callbacks of a Trainer."""
    return {
        f"{type(owner).__name__}.{name}": value
        for owner in owners
        for name, value in attributes(owner).items()
        if isinstance(value, nn.Module) and _has_plain_tensors(value)
    }


def _modules_in(variables: Iterable[tuple[str, object]]) -> Iterator[tuple[str, nn.Module]]:
    """The modules in variables for which fakes can stand, with the variable's name."""
    for name, value in variables:
        for module in walk([value], _parts):
            if isinstance(module, nn.Module) and _has_plain_tensors(module):
                yield name, module


def _variables(model: nn.Module, functions: Iterable[object]) -> Iterator[tuple[str, object]]:
    """The variables of functions and their owners, and the attributes of a model's modules."""
    yield from _outer_variables(model.modules(), [*functions])
    for prefix, module in model.named_modules():
        for name, value in _plain_attributes(module).items():
            yield f"{prefix}.{name}" if prefix else name, value


def _outer_variables(
    modules: Iterable[nn.Module], functions: Sequence[object]
) -> Iterator[tuple[str, object]]:
    """The variables of functions, of what modules hook, and of the functions' owners."""
    for reached in functions_of(modules, functions):
        yield from named_outer_variables(reached)
    for function in functions:
        if (owner := owner_of(function)) is not None:
            yield from attributes(owner).items()
        yield from ((type(part).__name__, part) for part in contents_of(function) or ())


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    """The attributes of a module that are not PyTorch's own."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def tensors_of(item: object) -> Iterator[torch.Tensor]:
    """The tensors of a module, or in a container."""
    if isinstance(item, nn.Module):
        return chain(item.parameters(), item.buffers())
    return tensors_in(item)


def _has_plain_tensors(module: nn.Module) -> bool:
    """Whether a module has tensors, and all are such that fakes can stand for them."""
    tensors = [*tensors_of(module)]
    return (
        bool(tensors)
        and not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
        and not any(
            isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
            or tensor.layout not in (torch.strided, torch.sparse_coo)
            or is_wrapper(type(tensor))
            or tensor.is_nested
            or tensor.is_quantized
            for tensor in tensors
        )
    )


def _parts(value: object) -> list[Any] | None:
    """The contents of containers; a module's parts belong to it."""
    return None if isinstance(value, nn.Module) or callable(value) else contents_of(value)


def new_name(name: str, taken: Mapping[str, object]) -> str:
    """A name that is not taken: its own, or with a number."""
    number, new = 1, name
    while new in taken:
        number, new = number + 1, f"{name}_{number + 1}"
    return new
