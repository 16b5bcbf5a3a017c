"""others_on_device(): what a process has on a device beside the models and batch of a training."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from memcallback.core.interruptions import raise_if_meant
from memcallback.core.tensors import storages_of, tensors_in
from memcallback.core.torch_private import DisableTorchFunctionSubclass, FakeTensor
from memcallback.core.visible import visible_name
from memcallback.diagnose.tensors.live import alive_objects, grad_fn_of
from memcallback.diagnose.tensors.variables import Scope, scope_tensors, scopes, stack
from memcallback.step.beside import new_name, plain_tensors, tensors_of, tensors_reached
from memcallback.step.holdings import holdings, states_of
from memcallback.step.model import is_sharded
from memcallback.step.training_step import TrainingStep

#: Who holds less than this is left out: numbers of the program's own.
_LEAST_BYTES = 1 << 20
_CUDA = torch.device("cuda")
_UNNAMED = "other tensors"


def others_on_device(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    step: TrainingStep,
    blocks: Mapping[int, int],
) -> dict[str, list[torch.Tensor]]:
    """The tensors in a device's blocks that neither these nor a step of theirs hold, by holder.

    Such are an average of the weights, an earlier model, a training set that lies on the device.
    `blocks` are the bytes of the allocator's blocks by address. All tensors of the process are
    searched, if there are more blocks than known tensors. Outputs of a running computation are
    left out. Empty for sharded models.
    """
    models = [*models, step.model]
    if any(map(is_sharded, models)):  # whose shards lie in storages of other kinds
        return {}
    with DisableTorchFunctionSubclass():
        optimizers = [*optimizers, *step.given_optimizers]
        known = set(holdings(models, optimizers, None, _CUDA).storages)
        # Of a batch that is a part of a training set on the device, the set is one of the others.
        batch = (tensor for tensor in tensors_in(step.batch) if _is_whole(tensor))
        attributes = chain.from_iterable(plain_tensors(step.model, on_host=False).values())
        beside = (tensor for it in step.beside().values() for tensor in tensors_of(it))
        reached = tensors_reached(step.model, step.functions_to_copy())
        for tensors in (batch, attributes, beside, reached):  # the later ones take longer
            known.update(one.data_ptr() for each in tensors for one in _storages(each))
            if sum(size for address, size in blocks.items() if address not in known) < _LEAST_BYTES:
                return {}
        others = _Others(known, blocks)
        return _named(others, scopes(stack(sys._getframe(1))), taken=step.also)


class _Others:
    """The storages in some blocks that are not known, each with the tensor that covers most."""

    def __init__(self, known: Set[int], blocks: Mapping[int, int]) -> None:
        self._known, self._blocks = known, blocks
        #: By the storage's address.
        self._tensors: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Add the storages of a tensor that are not known."""
        if grad_fn_of(tensor) is not None:
            return
        for storage in _storages(tensor):
            address = storage.data_ptr()
            if address not in self._blocks or address in self._known:
                continue
            other = self._tensors.get(address)
            if other is None or not _is_plain(other):
                self._tensors[address] = tensor if _is_plain(tensor) else _over(storage)

    def knows(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of some tensors belongs to the training."""
        return any(one.data_ptr() in self._known for each in tensors for one in _storages(each))

    def take(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some tensors whose storages are not known, and have not been taken."""
        return [
            self._tensors.pop(address)
            for tensor in tensors
            for storage in _storages(tensor)
            if (address := storage.data_ptr()) in self._tensors
        ]

    def rest(self) -> list[torch.Tensor]:
        """Those that nobody has taken, without single numbers: counters, the scale of a loss."""
        return [tensor for tensor in self._tensors.values() if tensor.numel() > 1]


def _named(
    others: _Others, around: Sequence[Scope], taken: Mapping[str, object]
) -> dict[str, list[torch.Tensor]]:
    """The others by the module, the optimizer or the variable that holds them."""
    modules: list[torch.nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    one: Any
    for one in alive_objects(torch.Tensor, torch.nn.Module, torch.optim.Optimizer):
        kind = type(one)
        if issubclass(kind, torch.nn.Module):
            modules.append(one)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(one)
        else:
            with _skipping():
                others.add(one)
    variables = {
        id(value): name for scope in reversed(around) for name, value in scope.values.items()
    }
    found: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def add(holder: object, tensors: Iterable[torch.Tensor]) -> None:
        found[variables.get(id(holder), type(holder).__name__)] += others.take(tensors)

    for module, tensors in _strangers(modules, others):
        gradients = (tensor.grad for tensor in tensors if tensor.grad is not None)
        add(module, chain(tensors, gradients))
    for optimizer in optimizers:
        with _skipping():
            add(optimizer, tensors_in([list(state.values()) for _, state in states_of(optimizer)]))
    if _bytes_of(others.rest()) >= _LEAST_BYTES:  # this search takes longest
        for path, tensor in scope_tensors(*(replace(scope, owner="{}") for scope in around)):
            with _skipping():
                found[path] += others.take([tensor])
        found[_UNNAMED] += others.rest()
    named: dict[str, list[torch.Tensor]] = {}
    for name, tensors in found.items():
        if _bytes_of(tensors) >= _LEAST_BYTES:
            named[new_name(visible_name(name), {**taken, **named})] = tensors
    return named


def _strangers(
    modules: Iterable[torch.nn.Module], others: _Others
) -> Iterator[tuple[torch.nn.Module, list[torch.Tensor]]]:
    """The outermost modules with no tensor of the training, with the tensors of all their parts.

    Each module is read once, and past its own methods.
    """
    own: dict[int, list[torch.Tensor]] = {}
    inside: dict[int, list[torch.nn.Module]] = {}
    around: defaultdict[int, list[int]] = defaultdict(list)
    pending: list[int] = []
    for module in modules:
        with _skipping():
            content = vars(module)
            tensors = (*content["_parameters"].values(), *content["_buffers"].values())
            own[id(module)] = [tensor for tensor in tensors if tensor is not None]
            inside[id(module)] = [one for one in content["_modules"].values() if one is not None]
            if others.knows(own[id(module)]):
                pending.append(id(module))
    for key, parts in inside.items():
        for part in parts:
            around[id(part)].append(key)
    of_training: set[int] = set()
    while pending:
        key = pending.pop()
        if key not in of_training:
            of_training.add(key)
            pending += around[key]
    for module in modules:
        if id(module) not in of_training and of_training.issuperset(around[id(module)]):
            every = _below(module, inside)
            yield module, [tensor for part in every for tensor in own.get(id(part), ())]


def _below(
    module: torch.nn.Module, inside: Mapping[int, Sequence[torch.nn.Module]]
) -> Iterator[torch.nn.Module]:
    """A module and all its parts, each once."""
    seen, pending = {id(module)}, [module]
    while pending:
        part = pending.pop()
        yield part
        new = [one for one in inside.get(id(part), ()) if id(one) not in seen]
        seen.update(map(id, new))
        pending += new


@contextmanager
def _skipping() -> Iterator[None]:
    """Go on after an error: an object of the user's, or one half made, may refuse to be read."""
    try:
        yield
    except Exception as error:
        raise_if_meant(error)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a fake can stand for a tensor and the whole of its storage."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def _over(storage: torch.UntypedStorage) -> torch.Tensor:
    """A plain tensor over a storage, which stands for others of any kind."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers most of its storages."""
    return tensor.layout is not torch.strided or (
        2 * tensor.nbytes >= sum(storage.nbytes() for storage in storages_of(tensor))
    )


def _bytes_of(plain: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in plain)


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor that are on a device of CUDA."""
    if issubclass(type(tensor), FakeTensor):
        return
    yield from (one for one in storages_of(tensor) if one.device.type == "cuda" and one.data_ptr())
