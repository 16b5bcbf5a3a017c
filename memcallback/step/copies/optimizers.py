"""Copy an optimizer onto fake parameters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

#: An optimizer's class and attributes.
OptimizerParts = tuple[type, dict[str, Any]]
#: Libraries whose optimizers are wrappers without a state.
_WRAPPED_BY = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
#: Attributes that tie an optimizer to its run: hooks, and the `step` that a scheduler or a profiler
#: puts in place of the class's own.
_TIES = ("step", *_STEP_HOOKS, "_optimizer_state_dict_pre_hooks")


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside a wrapper of Lightning, Fabric or accelerate.

    Another optimizer that holds one, such as Lookahead, has a state of its own, and stays. Without
    PyTorch's `__init__` it has no hooks; then it is a wrapper, too.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer) and (
        not hasattr(optimizer, "_optimizer_step_post_hooks")
        or any(base.__module__.split(".")[0] in _WRAPPED_BY for base in type(optimizer).__mro__)
    ):
        optimizer = inner
    unwrapped_optimizer: torch.optim.Optimizer = optimizer
    return unwrapped_optimizer


def with_owned(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer and those that it holds: Lookahead's, the rank's of ZeroRedundancyOptimizer."""
    found = [optimizer]
    for one in found:
        found += [
            inner
            for inner in vars(one).values()
            if isinstance(inner, torch.optim.Optimizer) and all(inner is not own for own in found)
        ]
    return found


def step_hooks(optimizers: Iterable[torch.optim.Optimizer]) -> list[Callable[..., Any]]:
    """The hooks that run before and after an update of some optimizers."""
    return [
        hook
        for optimizer in optimizers
        for one in with_owned(unwrapped(optimizer))
        for name in _STEP_HOOKS
        for hook in vars(one).get(name, {}).values()
    ]


def optimizer_parts(optimizer: Any) -> OptimizerParts:
    """An optimizer's class and attributes, to be copied together with its model."""
    optimizer = unwrapped(optimizer)
    return type(optimizer), {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _TIES and "hook" not in name and name != "_zero_grad_profile_name"
    }


def optimizer_from(parts: OptimizerParts) -> torch.optim.Optimizer:
    """Build an optimizer from the copied parts of another one."""
    kind, attributes = parts
    optimizer: torch.optim.Optimizer = object.__new__(kind)
    vars(optimizer).update(attributes)
    torch.optim.Optimizer.__setstate__(optimizer, {})
    for name in _STEP_HOOKS:
        vars(optimizer)[name] = OrderedDict()
    return optimizer


def moved_to(parts: OptimizerParts, successors: Mapping[int, torch.nn.Parameter]) -> OptimizerParts:
    """An optimizer's parts without state, for the parameters of a model after sharding."""
    kind, attributes = parts
    groups = [
        {
            **group,
            "params": [
                successors[id(parameter)]
                for parameter in group["params"]
                if id(parameter) in successors
            ],
        }
        for group in attributes["param_groups"]
    ]
    return kind, {**attributes, "param_groups": groups, "state": defaultdict(dict)}


def run_to_the_end(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make each LBFGS update run all its iterations: ending early would depend on values."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            for group in optimizer.param_groups:
                group["tolerance_grad"] = group["tolerance_change"] = -1.0


def fill_history(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Fill LBFGS's history as further updates would; whether there was anything to fill."""
    is_filled = False
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.LBFGS):
            continue
        for state in optimizer.state.values():
            for name in ("old_dirs", "old_stps", "ro"):
                history = state.get(name) or []
                while 0 < len(history) < optimizer.param_groups[0]["history_size"]:
                    history.append(torch.empty_like(history[0]))
                    is_filled = True
    return is_filled
