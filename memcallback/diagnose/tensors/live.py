"""Finds the storages that are alive on a device, and who owns them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from types import FrameType
from typing import Any, TypeVar

import torch

from memcallback.core.interruptions import PassOver, raise_if_meant
from memcallback.core.tensors import is_on, parts_of, tensors_in
from memcallback.core.torch_private import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    base_of,
    storage_id,
)
from memcallback.core.types import Category
from memcallback.core.visible import visible_name
from memcallback.diagnose.tensors.saved import graph_nodes, saved_tensors
from memcallback.diagnose.tensors.variables import Scope, module_attributes, scope_tensors, scopes
from memcallback.step.holdings import states_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """A live storage, described by the tensor that covers most of it. It holds no tensor.

    Attributes:
        size_bytes: The size of the storage.
        shape: The shape of that tensor.
        dtype: The dtype of that tensor, such as `float32`.
        category: Parameter, buffer, gradient, optimizer state, input, or activation (saved for the
            backward pass); None for anything else.
        owner: Who holds it, such as `layer1.0.conv1.weight`, `gradient of fc.weight`, `exp_avg of
            fc.weight`, `input`, `local variable 'losses' in train() of train.py`, `attribute
            'cache' of module 'encoder'`, `saved for ConvolutionBackward0 of layer1.0.conv1`; empty
            if unknown.
        module: The fully qualified name of the module that owns or saved it; the root is "", None
            is unknown.
        address: Its first byte, unique among live storages.
        order: Its position among the live storages that autograd saved; None if not saved.
    """

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: Category | None
    owner: str
    module: str | None
    address: int
    order: int | None = None


def live_tensors(
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    batch: object,
    device: torch.device,
    *,
    frames: Iterable[FrameType] = (),
) -> tuple[LiveTensor, ...]:
    """Find the live storages of a device, largest first.

    A storage counts once, for its first owner of: parameters, buffers, gradients, optimizer state,
    the batch, attributes of modules, variables, other gradients, tensors that autograd saved, all
    other tensors. Storages that only C++ holds cannot be found (gradients of a running backward
    pass, workspaces, tensors saved by PyTorch before 2.11). Nothing is computed, allocated on the
    device or kept alive. Objects that cannot be read are skipped.
    """
    return tuple(
        live for live, _ in live_storages(modules, optimizers, batch, device, frames=frames)
    )


def live_storages(
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    batch: object,
    device: torch.device,
    *,
    frames: Iterable[FrameType] = (),
    others: Sequence[torch.Tensor] | None = None,
) -> list[tuple[LiveTensor, weakref.ref[torch.UntypedStorage]]]:
    """The same with weak references; `others` are all tensors Python knows, if already listed."""
    around = scopes(frames)
    others = alive_objects(torch.Tensor) if others is None else others
    with DisableTorchFunctionSubclass():
        models = _models(list(modules), around)
        named = _named_parameters(models)
        search = _Search(device)
        search.add(
            "parameters",
            (
                (known.parameter, known.owner, Category.PARAMETER, known.module)
                for known in named.values()
            ),
        )
        for suffix, model in models:
            search.add(
                "buffers",
                (
                    (buffer, name + suffix, Category.BUFFER, _parent(name))
                    for name, buffer in model.named_buffers()
                ),
            )
        search.add(
            "gradients",
            (
                (
                    known.parameter.grad,
                    f"gradient of {known.owner}",
                    Category.GRADIENT,
                    known.module,
                )
                for known in named.values()
            ),
        )
        for optimizer in _optimizers(optimizers, around):
            search.add("optimizer", _owned_by(optimizer, named))
        search.add(
            "batch", ((tensor, "input", Category.INPUT, None) for tensor in tensors_in(batch))
        )
        for _, model in models:
            search.add(
                "attributes",
                ((tensor, owner, None, name) for name, owner, tensor in module_attributes(model)),
            )
        for scope in around:
            search.add(
                "variables", ((tensor, owner, None, None) for owner, tensor in scope_tensors(scope))
            )
        search.add("other gradients", _other_gradients(others, search.owner_of))
        saved = list(_saved(others, named))
        # If several nodes saved a tensor, one of a known module owns it.
        search.add("saved", sorted(saved, key=lambda owned: owned[3] is None))
        search.set_order(tensor for tensor, *_ in saved)
        search.add("others", map(_unowned, others))
    return search.result


def alive_objects(*wanted: type[T]) -> list[T]:
    """All objects of some classes that Python knows."""
    # A process has a million objects and more, so we compare the ids of their types, and run no
    # Python code per object.
    kinds: list[type] = [*wanted]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    are_wanted, objects = set(map(id, kinds)), gc.get_objects()
    return list(compress(objects, map(are_wanted.__contains__, map(id, map(type, objects)))))


#: A tensor, its owner, its category and its module.
_Owned = tuple[torch.Tensor | None, str, Category | None, str | None]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """A parameter with its name and module in the first model that has it.

    A tied parameter has several names there.
    """

    parameter: torch.Tensor
    owner: str
    module: str
    is_tied: bool


@dataclass
class _Found:
    """A storage, described by the tensor of its first source that covers most of it."""

    live: LiveTensor
    source: str
    covered_bytes: int
    reference: weakref.ref[torch.UntypedStorage]


class _Search:
    """Collects live storages from one source after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: By the identity of the storage, unique among live ones.
        self._found: dict[int, _Found] = {}

    @property
    def result(self) -> list[tuple[LiveTensor, weakref.ref[torch.UntypedStorage]]]:
        """The storages, largest first; equal sizes in the order of their sources."""
        largest_first = sorted(self._found.values(), key=lambda found: -found.live.size_bytes)
        return [(found.live, found.reference) for found in largest_first]

    def add(self, source: str, owned: Iterable[_Owned]) -> None:
        """Add storages that no earlier source had; mark earlier ones that autograd saved."""
        with PassOver():  # reading a source may run user code; the rest of it is skipped
            for tensor, owner, category, module in owned:
                if tensor is not None and not issubclass(type(tensor), FakeTensor):
                    with PassOver():  # a tensor of a user's class without a storage
                        for part in parts_of(tensor):
                            self._add_part(source, part, owner, category, module)

    def _add_part(
        self,
        source: str,
        part: torch.Tensor,
        owner: str,
        category: Category | None,
        module: str | None,
    ) -> None:
        storage = part.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
        if not size or not address or not is_on(storage.device, self._device):
            return
        covered = min(part.numel() * part.element_size(), size)
        known = self._found.get(storage_id(storage))
        if known is not None and (known.source != source or known.covered_bytes >= covered):
            if category is Category.ACTIVATION and known.live.category is None:
                known.live = replace(
                    known.live, category=category, module=known.live.module or module
                )
            return
        dtype = str(part.dtype).removeprefix("torch.")
        live = LiveTensor(
            size_bytes=size,
            shape=_shape(part),
            dtype=dtype,
            category=category,
            owner=visible_name(owner),
            module=None if module is None else visible_name(module),
            address=address,
        )
        self._found[storage_id(storage)] = _Found(live, source, covered, weakref.ref(storage))

    def set_order(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Number the storages in the order of these tensors."""
        for order, tensor in enumerate(tensors):
            with PassOver():  # as in `add`
                for part in parts_of(tensor) if tensor is not None else ():
                    known = self._found.get(storage_id(part.untyped_storage()))
                    if known is not None and known.live.order is None:
                        known.live = replace(known.live, order=order)

    def owner_of(self, tensor: torch.Tensor) -> str:
        """The owner of a tensor's storage; empty if unknown."""
        with PassOver():  # as in `add`
            for part in parts_of(tensor):
                if (known := self._found.get(storage_id(part.untyped_storage()))) is not None:
                    return known.live.owner
        return ""


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(map(int, tensor.shape))
    except RuntimeError:  # a nested tensor with rows of different lengths
        return (tensor.numel(),)


def _models(
    modules: Sequence[torch.nn.Module], around: Sequence[Scope]
) -> list[tuple[str, torch.nn.Module]]:
    """The given models and the outermost ones in variables, each with a suffix for its names."""
    inside: set[int] = set()
    for module in modules:
        inside |= _parts(module) | {id(module)}
    variables: dict[int, tuple[str, torch.nn.Module]] = {}
    for scope in around:
        for name, value in scope.values.items():
            if issubclass(type(value), torch.nn.Module) and id(value) not in inside:
                variables.setdefault(id(value), (name, value))  # type: ignore[arg-type]
    for _, model in variables.values():
        inside |= _parts(model)
    models = [
        (f" of {type(module).__name__}" if len(modules) > 1 else "", module) for module in modules
    ]
    outermost = [(name, model) for key, (name, model) in variables.items() if key not in inside]
    is_alone = not models and len(outermost) == 1
    return models + [("" if is_alone else f" of {name}", model) for name, model in outermost]


def _parts(model: torch.nn.Module) -> set[int]:
    """The ids of the modules inside a model; empty for one that is not initialised."""
    parts: set[int] = set()
    with PassOver():  # a module before its __init__ has no children to read
        parts.update(id(part) for part in model.modules() if part is not model)
    return parts


def _named_parameters(models: Sequence[tuple[str, torch.nn.Module]]) -> dict[int, _Parameter]:
    """The parameters of models, by id."""
    parameters: dict[int, _Parameter] = {}
    for suffix, model in models:
        of_model: dict[int, _Parameter] = {}
        with PassOver():  # a user's module may override what is read here
            for name, parameter in model.named_parameters(remove_duplicate=False):
                key = id(parameter)
                if key in of_model:
                    of_model[key] = replace(of_model[key], is_tied=True)
                else:
                    of_model[key] = _Parameter(
                        parameter=parameter,
                        owner=name + suffix,
                        module=_parent(name),
                        is_tied=False,
                    )
        parameters |= {key: known for key, known in of_model.items() if key not in parameters}
    return parameters


def _parent(name: str) -> str:
    """The name of the module of a parameter or buffer."""
    return name.rpartition(".")[0]


def _optimizers(
    optimizers: Iterable[torch.optim.Optimizer], around: Sequence[Scope]
) -> list[torch.optim.Optimizer]:
    """The given optimizers and those in variables."""
    values: Iterator[Any] = (value for scope in around for value in scope.values.values())
    in_variables = (value for value in values if issubclass(type(value), torch.optim.Optimizer))
    return list({id(optimizer): optimizer for optimizer in (*optimizers, *in_variables)}.values())


def _owned_by(
    optimizer: torch.optim.Optimizer, named: Mapping[int, _Parameter]
) -> Iterator[_Owned]:
    """The state of an optimizer, and parameters and gradients that belong to no model."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kind = type(optimizer).__name__
    owners: dict[int, tuple[str, str | None]] = {
        id(parameter): (f"parameter {number} of {kind}", None)
        for number, parameter in enumerate(parameters)
    }
    owners |= {key: (known.owner, known.module) for key, known in named.items()}
    for parameter in parameters:
        owner, module = owners[id(parameter)]
        yield parameter, owner, Category.PARAMETER, module
        yield parameter.grad, f"gradient of {owner}", Category.GRADIENT, module
    for key, state in states_of(optimizer):
        owner, module = owners.get(id(key), (kind, None))
        entries = list(state.items()) if isinstance(state, Mapping) else [("state", state)]
        for name, value in entries:
            for tensor in tensors_in(value):
                yield tensor, f"{name} of {owner}", Category.OPTIMIZER_STATE, module


def _other_gradients(
    tensors: Iterable[torch.Tensor], owner_of: Callable[[torch.Tensor], str]
) -> Iterator[_Owned]:
    """Gradients of tensors that are not parameters of a model."""
    for tensor in tensors:
        gradient = None
        with PassOver():  # a tensor of a user's class may refuse to be asked
            # For other tensors, reading `grad` makes PyTorch warn.
            gradient = tensor.grad if _is_leaf(tensor) or tensor.retains_grad else None
        if gradient is not None:
            owner = " of ".join(filter(None, ("gradient", owner_of(tensor))))
            yield gradient, owner, Category.GRADIENT, None


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf, without creating an autograd node (see `grad_fn_of`)."""
    base = base_of(tensor)
    if base is not tensor and base.requires_grad:
        return False
    return tensor.is_leaf


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """The autograd node that created a tensor, or for a view its base; None for a leaf."""
    # After an in-place write to its base a view has no node yet, and reading grad_fn would create
    # one. That would change the sequence numbers of later nodes, and so the order of backward.
    try:
        return base_of(tensor).grad_fn
    except Exception as error:  # a view of a tensor that was written meanwhile may refuse
        raise_if_meant(error)
        return None


def _saved(tensors: Iterable[torch.Tensor], named: Mapping[int, _Parameter]) -> Iterator[_Owned]:
    """The tensors saved in the graph behind tensors, in the order they were saved."""
    modules = {key: known.module for key, known in named.items() if not known.is_tied}
    for saved in saved_tensors(graph_nodes(filter(None, map(grad_fn_of, tensors))), modules):
        owner = (
            f"attribute '{saved.attribute}' of {saved.node}"
            if saved.attribute
            else f"saved for {saved.node}"
        )
        of = f" of {saved.module}" if saved.module else ""
        yield saved.tensor, owner + of, Category.ACTIVATION, saved.module


def _unowned(tensor: torch.Tensor) -> _Owned:
    """A tensor without an owner, described by its type and autograd node."""
    node = grad_fn_of(tensor)
    category = Category.PARAMETER if issubclass(type(tensor), torch.nn.Parameter) else None
    return (
        tensor,
        f"output of {node.name().rpartition('::')[2]}" if node is not None else "",
        category,
        None,
    )
