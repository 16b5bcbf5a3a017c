"""Which storages are alive and who owns them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memcallback.core.tensors import is_on, parts_of, tensors_in
from memcallback.core.types import Category
from memcallback.diagnose.tensors.saved import graph_nodes, saved_tensors
from memcallback.diagnose.tensors.variables import Scope, module_attributes, scope_tensors, scopes


@dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """One storage, described by the tensor that owns most of it. It holds no tensor.

    Attributes:
        size_bytes: Of the storage.
        shape: Of that tensor.
        dtype: Of that tensor, such as `float32`.
        category: What it is for: a parameter, a buffer, a gradient, optimizer state, the input, or
            an activation, which is what was saved for the backward pass; None for anything else.
        owner: Who holds it, such as `layer1.0.conv1.weight`, `gradient of fc.weight`, `exp_avg of
            fc.weight`, `input`, `local variable 'losses' in train() of train.py`, `attribute
            'cache' of module 'encoder'`, `saved for ConvolutionBackward0 of layer1.0.conv1`; empty
            if that is not known.
        module: The fully qualified name of the module that has it, or whose operator saved it; the
            root is "", None is unknown.
        address: Where it begins. No two that are alive at one time have the same.
        order: Its place in the order in which autograd saved those that stand; None if it did not
            save it.
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
    """Find the storages that are alive on a device.

    A storage counts once, for the first that owns it of: parameters, buffers, gradients, optimizer
    state, the batch, attributes of modules, variables, whatever else Python knows, what autograd
    saved for the backward pass. What only C++ holds cannot be seen (the gradients that a backward
    pass is working on, workspaces, what PyTorch before 2.11 saved). Nothing is allocated on the
    device, nothing is computed and nothing is kept alive; an object that cannot be read is left
    out.
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
    """As `live_tensors`, each with the storage, which this keeps no longer alive than it is;
    `others` are Python's tensors, if they are known.
    """
    given, around = list(modules), scopes(frames)
    others = alive_tensors() if others is None else others
    with torch._C.DisableTorchFunctionSubclass():
        models = _models(given, around)
        named = _named_parameters(models)
        search = _Search(device)
        search.add(
            "parameters",
            ((one.parameter, one.owner, Category.PARAMETER, one.module) for one in named.values()),
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
                (one.parameter.grad, f"gradient of {one.owner}", Category.GRADIENT, one.module)
                for one in named.values()
            ),
        )
        for optimizer in _optimizers(optimizers, around):
            search.add("optimizer", _held_by(optimizer, named))
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
        # Of several nodes that saved one, that of a known module comes first.
        search.add("saved", sorted(saved, key=lambda owned: owned[3] is None))
        search.number(tensor for tensor, *_ in saved)
        search.add("others", map(_unowned, others))
    return search.found


def alive_tensors() -> list[torch.Tensor]:
    """The tensors that Python knows. A process has a million objects and more: they are told apart
    by their types' identities, without Python code.
    """
    kinds: list[type] = [torch.Tensor]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    are_tensors, objects = set(map(id, kinds)), gc.get_objects()
    return list(compress(objects, map(are_tensors.__contains__, map(id, map(type, objects)))))


#: A tensor, its owner, what it is for, and its module.
_Owned = tuple[torch.Tensor | None, str, Category | None, str | None]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """A parameter with the name that it has in the first model that has it, and its module; whether
    it has several.
    """

    parameter: torch.Tensor
    owner: str
    module: str
    is_tied: bool


@dataclass
class _Found:
    """A storage, by the tensor that covers most of it among those of the same source."""

    live: LiveTensor
    source: str
    covered_bytes: int
    reference: weakref.ref[torch.UntypedStorage]


class _Search:
    """One search for live tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: By the identity of the storage, which no other has while it is alive.
        self._found: dict[int, _Found] = {}

    @property
    def found(self) -> list[tuple[LiveTensor, weakref.ref[torch.UntypedStorage]]]:
        """The storages, the largest first; those of one size in the order of their sources, which
        is not another one in each run.
        """
        found = sorted(self._found.values(), key=lambda one: -one.live.size_bytes)
        return [(one.live, one.reference) for one in found]

    def add(self, source: str, owned: Iterable[_Owned]) -> None:
        """Take the storages of tensors that no earlier source had; of an earlier one only learn
        that autograd saved it.
        """
        # What a source reads may be code of the user's, which may raise: the rest of that source is
        # then left out.
        with suppress(Exception):
            for tensor, owner, category, module in owned:
                if tensor is not None and not issubclass(type(tensor), FakeTensor):
                    with suppress(Exception):
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
        known = self._found.get(storage._cdata)
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
            owner=owner,
            module=module,
            address=address,
        )
        self._found[storage._cdata] = _Found(live, source, covered, weakref.ref(storage))

    def number(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Give storages their place in the order of tensors, of which several can have one."""
        for order, tensor in enumerate(tensors):
            with suppress(Exception):
                for part in parts_of(tensor) if tensor is not None else ():
                    known = self._found.get(part.untyped_storage()._cdata)
                    if known is not None and known.live.order is None:
                        known.live = replace(known.live, order=order)

    def owner_of(self, tensor: torch.Tensor) -> str:
        """Who owns the storage of a tensor, as far as it is known; empty if it is not."""
        with suppress(Exception):
            for part in parts_of(tensor):
                if (known := self._found.get(part.untyped_storage()._cdata)) is not None:
                    return known.live.owner
        return ""


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(map(int, tensor.shape))
    except RuntimeError:  # a nested one, whose rows are not of one length
        return (tensor.numel(),)


def _models(
    modules: Sequence[torch.nn.Module], around: Sequence[Scope]
) -> list[tuple[str, torch.nn.Module]]:
    """The models, those that were given and the outermost that variables hold, each with what is
    said after the names of its parameters.
    """
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
    """The ids of the modules in a model; none for one that cannot be read, such as one that is not
    initialised.
    """
    found: set[int] = set()
    with suppress(Exception):
        found.update(id(part) for part in model.modules() if part is not model)
    return found


def _named_parameters(models: Sequence[tuple[str, torch.nn.Module]]) -> dict[int, _Parameter]:
    """The parameters of models, by id."""
    found: dict[int, _Parameter] = {}
    for suffix, model in models:
        of_model: dict[int, _Parameter] = {}
        with suppress(Exception):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                first = of_model.get(id(parameter))
                of_model[id(parameter)] = (
                    _Parameter(
                        parameter=parameter,
                        owner=name + suffix,
                        module=_parent(name),
                        is_tied=False,
                    )
                    if first is None
                    else replace(first, is_tied=True)
                )
        found |= {key: one for key, one in of_model.items() if key not in found}
    return found


def _parent(name: str) -> str:
    """The module of a parameter or buffer."""
    return name.rpartition(".")[0]


def _optimizers(
    given: Iterable[torch.optim.Optimizer], around: Sequence[Scope]
) -> list[torch.optim.Optimizer]:
    """The optimizers, those that were given and those that variables hold."""
    values: Iterator[Any] = (value for scope in around for value in scope.values.values())
    held = (value for value in values if issubclass(type(value), torch.optim.Optimizer))
    return list({id(optimizer): optimizer for optimizer in (*given, *held)}.values())


def _held_by(optimizer: torch.optim.Optimizer, named: Mapping[int, _Parameter]) -> Iterator[_Owned]:
    """The state of an optimizer; the parameters that it has and no model, with their gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kind = type(optimizer).__name__
    owners: dict[int, tuple[str, str | None]] = {
        id(one): (f"parameter {number} of {kind}", None) for number, one in enumerate(parameters)
    }
    owners |= {key: (one.owner, one.module) for key, one in named.items()}
    for parameter in parameters:
        owner, module = owners[id(parameter)]
        yield parameter, owner, Category.PARAMETER, module
        yield parameter.grad, f"gradient of {owner}", Category.GRADIENT, module
    for key, state in list(optimizer.state.items()):
        owner, module = owners.get(id(key), (kind, None))
        for name, value in (
            list(state.items()) if isinstance(state, Mapping) else [("state", state)]
        ):
            for tensor in tensors_in(value):
                yield tensor, f"{name} of {owner}", Category.OPTIMIZER_STATE, module


def _other_gradients(
    tensors: Iterable[torch.Tensor], owner_of: Callable[[torch.Tensor], str]
) -> Iterator[_Owned]:
    """Gradients of tensors that are no model's parameters."""
    for tensor in tensors:
        gradient = None
        with suppress(Exception):
            # PyTorch warns where the gradient of any other tensor is asked for.
            gradient = tensor.grad if _is_leaf(tensor) or tensor.retains_grad else None
        if gradient is not None:
            yield (
                gradient,
                " of ".join(filter(None, ("gradient", owner_of(tensor)))),
                Category.GRADIENT,
                None,
            )


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf of the graph, asked of views only where that makes no node, as it
    can in `grad_fn_of`.
    """
    if tensor._is_view() and tensor._base.requires_grad:  # type: ignore[union-attr]
        return False
    return tensor.is_leaf


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """The autograd node that made a tensor; of a view, the one that made what it is a view of.

    A view may have none yet, after something was written into its base: asking for it makes one,
    and those that the program makes afterwards get other places in the order in which a backward
    pass runs.
    """
    try:
        return (tensor._base if tensor._is_view() else tensor).grad_fn  # type: ignore[union-attr]
    except Exception:
        return None


def _saved(tensors: Iterable[torch.Tensor], named: Mapping[int, _Parameter]) -> Iterator[_Owned]:
    """What is saved for backward in the graph behind tensors, in the order in which it was saved."""
    modules = {key: one.module for key, one in named.items() if not one.is_tied}
    for saved in saved_tensors(graph_nodes(filter(None, map(grad_fn_of, tensors))), modules):
        owner = (
            f"attribute '{saved.attribute}' of {saved.node}"
            if saved.attribute
            else f"saved for {saved.node}"
        )
        of = f" of {saved.module}" if saved.module else ""
        yield saved.tensor, owner + of, Category.ACTIVATION, saved.module


def _unowned(tensor: torch.Tensor) -> _Owned:
    """A tensor that Python knows, of which only its kind and its making tell something."""
    node = grad_fn_of(tensor)
    category = Category.PARAMETER if issubclass(type(tensor), torch.nn.Parameter) else None
    return (
        tensor,
        f"output of {node.name().rpartition('::')[2]}" if node is not None else "",
        category,
        None,
    )
