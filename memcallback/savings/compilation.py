"""torch.compile as a way to need less memory, and how much it may keep for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from memcallback.savings.plan import SavingGroup
from memcallback.savings.saving import COMPILATION, Saving
from memcallback.step.copies.compiled import has_compiled_code, is_compiled_function
from memcallback.step.model import layer_containers
from memcallback.step.training_step import TrainingStep

#: 1 is PyTorch's default. What is kept does not shrink evenly, so each is predicted by itself.
_BUDGETS = (0.75, 0.5, 0.25, 0.0)
#: With CUDA graphs. "max-autotune" has them too, and needs the same but for kernels that it chooses
#: by measuring.
_GRAPHS = "reduce-overhead"
#: Under which strategies ranks with compiled layers were compared with ranks that ran.
_STRATEGIES = ("ddp", "fsdp2")
#: How the caveats begin that tell of code that was not compiled (trace/patches/compiled.py and
#: trace/caveats.py).
_NOT_COMPILED = (
    "torch.compile compiles no operator of this step",
    "Compiled code ran as it would without compilation",
    "Compiled code was traced as it would run without compilation",
    "A compiled module was traced as it would run without compilation",
)
#: What the caveat says of a training that PyTorch stops (trace/patches/cuda_graphs.py).
_STOPPED = "PyTorch refuses that with an error"


def compilation(step: TrainingStep) -> Iterator[Saving]:
    """Compiling what is not compiled, and smaller budgets for what is."""
    is_compiled = (
        any(map(has_compiled_code, step.model.modules()))
        or any(map(is_compiled_function, step.losses))
        or step.compile_update is not None
        or (step.ranks is not None and step.ranks.compiles_wrapper)
    )
    if step.ranks is not None and step.ranks.strategy not in _STRATEGIES:
        return
    if not is_compiled and step.ranks is not None:
        yield from _by_layer(step.model)
        return
    if not is_compiled:
        yield Saving(
            name="torch.compile",
            kind=COMPILATION,
            group=SavingGroup.CHANGES_NUMBERS,
            apply=partial(TrainingStep.varied, prepare=_compiled),
            changes="rounding, in fused kernels",
            line="model = torch.compile(model)",
        )
        if step.accumulate == 1:  # else a training stops where it adds up gradients of graphs
            yield Saving(
                name=f'torch.compile, mode="{_GRAPHS}"',
                kind=COMPILATION,
                group=SavingGroup.CHANGES_NUMBERS,
                apply=partial(TrainingStep.varied, prepare=partial(_compiled, mode=_GRAPHS)),
                changes="rounding, in fused kernels",
                line=f'model = torch.compile(model, mode="{_GRAPHS}")',
            )
        return
    for budget in _BUDGETS:
        yield Saving(
            name=f"activation_memory_budget {budget:g}",
            kind=COMPILATION,
            group=SavingGroup.CHANGES_NUMBERS,
            apply=lambda step: step,
            changes="rounding, in what is computed again in the backward pass",
            line=f"torch._functorch.config.activation_memory_budget = {budget:g}",
            activation_memory_budget=budget,
        )


def _by_layer(model: nn.Module) -> Iterator[Saving]:
    """Compiling each layer by itself, as ranks do: their hooks run between the layers."""
    try:
        containers = layer_containers(model)
    except ValueError:  # there are no layers
        return
    named = [_written(name) for name in containers]
    layers = named[0] if len(named) == 1 else f"[{', '.join(f'*{name}' for name in named)}]"
    is_own = all(
        type(layer).forward.__module__.partition(".")[0] != "torch"
        for name in containers
        for layer in model.get_submodule(name).children()
    )
    # In place, PyTorch does not compile a forward pass of its own classes.
    call = "layer.compile()" if is_own else "layer.forward = torch.compile(layer.forward)"
    yield Saving(
        name="torch.compile, each layer",
        kind=COMPILATION,
        group=SavingGroup.CHANGES_NUMBERS,
        apply=partial(TrainingStep.varied, prepare=partial(_layers_compiled, containers)),
        changes="rounding, in fused kernels",
        line=f"for layer in {layers}: {call}",
    )


def _written(name: str) -> str:
    """A module's place in Python."""
    if all(part.isidentifier() for part in name.split(".")):
        return f"model.{name}"
    return f'model.get_submodule("{name}")' if name else "model"


def _layers_compiled(containers: Sequence[str], model: nn.Module, batch: Any) -> Any:
    for container in containers:
        for layer in model.get_submodule(container).children():
            _compiled(layer, batch)
    return batch


def _compiled(model: nn.Module, batch: Any, *, mode: str | None = None) -> Any:
    # The Trainer runs the training step of a compiled LightningModule compiled.
    for name in ("forward", "training_step"):
        if hasattr(model, name):
            setattr(model, name, torch.compile(getattr(model, name), mode=mode))
    return batch


@contextmanager
def activation_memory_budget(budget: float | None) -> Iterator[None]:
    """Compile inside with a budget; None for PyTorch's default."""
    if budget is None:
        yield
        return
    config: Any = import_module("torch._functorch.config")
    with config.patch(activation_memory_budget=budget):
        yield


def why_not_compiled(caveats: tuple[str, ...]) -> str | None:
    """Why a step does not run compiled, as predicted or as PyTorch stops it; None if it does."""
    return next((one for one in caveats if one.startswith(_NOT_COMPILED) or _STOPPED in one), None)
