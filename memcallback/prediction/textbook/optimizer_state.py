"""The size of an optimizer's state: as it is, or after one step of a copy on meta tensors."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from memcallback.core.torch_private import storage_id, tree_leaves
from memcallback.step.copies.objects import copy_with
from memcallback.step.copies.optimizers import optimizer_from, optimizer_parts
from memcallback.step.holdings import states_of


def optimizer_state_bytes(
    optimizer: torch.optim.Optimizer, *, device_type: str | None = None
) -> Mapping[str, int] | None:
    """Bytes of state per device type after updates; None if the optimizer cannot step on meta.

    `device_type` is where the parameters will be, if theirs are CPU fakes of it. Parameters that
    already have state keep its size. Frozen parameters have none.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return {device_type or _device_type_of(optimizer): _lbfgs_bytes(optimizer)}
    total: Counter[str] = Counter()
    missing: list[int] = []
    states = _states(optimizer)
    for position, (parameter, group) in enumerate(_parameters(optimizer)):
        state = states.get(id(parameter), [])
        for tensor in state:
            total[_device_type(tensor, group, device_type)] += tensor.untyped_storage().nbytes()
        if not state and parameter.requires_grad:
            missing.append(position)
    if missing:
        stepped = _stepped_on_meta(optimizer)
        if stepped is None:
            return None
        states = _states(stepped)
        copies = [parameter for parameter, _ in _parameters(stepped)]
        originals = [parameter for parameter, _ in _parameters(optimizer)]
        for position in missing:
            on_device = device_type or originals[position].device.type
            for tensor in states.get(id(copies[position]), []):
                kind = on_device if tensor.device.type == "meta" else tensor.device.type
                total[kind] += tensor.untyped_storage().nbytes()
    return {kind: num_bytes for kind, num_bytes in total.items() if num_bytes}


def _states(optimizer: torch.optim.Optimizer) -> dict[int, list[torch.Tensor]]:
    """The tensors of each parameter's state, by the parameter's id."""
    states: dict[int, list[torch.Tensor]] = {}
    for parameter, state in states_of(optimizer):
        states.setdefault(id(parameter), []).extend(_tensors(state))
    return states


def _stepped_on_meta(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """A copy after one update on meta tensors; None if it fails before its state is made.

    State on the parameter's device is made on meta, state on the host on the CPU.
    """
    copy = optimizer_from(copy_with(optimizer_parts(optimizer), _on_meta))
    # The undecorated function: hooks that PyTorch calls for every optimizer see nothing of this.
    step = inspect.unwrap(type(copy).step)
    groups = copy.param_groups
    for group in groups:
        if group.get("fused"):
            # Fused updates refuse meta. They keep `step` where capturable ones do: on the device.
            group["fused"], group["capturable"] = None, True
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = _gradient(parameter, copy)
        copy.param_groups = [group]
        try:
            with torch.no_grad():
                step(copy)
        except Exception:  # an optimizer can refuse tensors without values in any way
            # torch.optim makes all state of a group before it computes. Another optimizer may have
            # failed half way through.
            if not step.__module__.startswith("torch.optim."):
                return None
    copy.param_groups = groups
    return copy


def _gradient(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    if isinstance(optimizer, torch.optim.SparseAdam):  # which refuses dense gradients
        return torch.empty(
            parameter.shape, dtype=parameter.dtype, layout=torch.sparse_coo, device="meta"
        )
    return torch.empty_like(parameter)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.requires_grad)


def _lbfgs_bytes(optimizer: torch.optim.LBFGS) -> int:
    """LBFGS with a full history (torch/optim/lbfgs.py); it takes many updates to fill.

    d, prev_flat_grad and the history's old_dirs and old_stps are each as long as all parameters
    together, frozen ones included. H_diag, the history's ro and al, and with a line search t, are
    scalars.
    """
    total = 0
    for group in optimizer.param_groups:
        parameters, history_size = group["params"], group["history_size"]
        flat_bytes = sum(p.numel() * p.element_size() for p in parameters)
        num_scalars = 1 + 2 * history_size + (group["line_search_fn"] is not None)
        total += (2 + 2 * history_size) * flat_bytes
        total += num_scalars * max(p.element_size() for p in parameters)
    return total


def _parameters(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, Mapping[str, Any]]]:
    return ((parameter, group) for group in optimizer.param_groups for parameter in group["params"])


def _device_type_of(optimizer: torch.optim.Optimizer) -> str:
    parameter, _ = next(_parameters(optimizer))
    return parameter.device.type


def _device_type(tensor: torch.Tensor, group: Mapping[str, Any], device_type: str | None) -> str:
    """The device of existing state; scalars such as `step` stay on the CPU unless capturable."""
    is_on_host = (
        tensor.device.type == "cpu"
        and tensor.dim() == 0
        and not (group.get("capturable") or group.get("fused"))
    )
    return tensor.device.type if device_type is None or is_on_host else device_type


def _tensors(state: object) -> list[torch.Tensor]:
    """The tensors in a parameter's state, one for each storage."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return list({storage_id(tensor.untyped_storage()): tensor for tensor in tensors}.values())
