"""The optimizers of a step: made from what a user passes, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from memcallback.core.errors import PredictionError
from memcallback.core.validation import cannot_take, described, name_of
from memcallback.step.lightning_loop import configured_optimizers

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
#: What `TrainingStep` takes as its optimizer.
OptimizerOption = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakeOptimizer | None


def optimizers_for(
    model: Any, optimizer: OptimizerOption, *, is_lightning: bool
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that were passed, or new ones for a model, which may be a copy."""
    if optimizer is None:
        return configured_optimizers(model) if is_lightning else ()
    if isinstance(optimizer, torch.optim.Optimizer):
        return (optimizer,)
    if isinstance(optimizer, Sequence):
        return tuple(optimizer)
    try:
        # A list, as a function may go through them for each of its groups.
        created = optimizer(list(model.parameters()))
    except Exception as error:  # a user's function can fail in any way
        raise PredictionError(
            f"optimizer {name_of(optimizer)} failed when it was called with the model's "
            f"parameters: {type(error).__name__}: {error}"
        ) from error
    if wrong := _wrong_with_optimizer(created, model):
        raise PredictionError(f"optimizer {name_of(optimizer)} {wrong}")
    return (created,)


def check_optimizers(model: nn.Module, optimizer: object) -> None:
    """Check that optimizers are the model's, or a function that can be called with parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_parameters(model, optimizer)
    elif isinstance(optimizer, Sequence) and not isinstance(optimizer, (str, bytes)):
        for number, each in enumerate(optimizer):
            if callable(each):
                raise TypeError(
                    f"optimizer[{number}] is {name_of(each)}, which makes an optimizer; a list "
                    "must hold optimizers of the model. Give it alone, not in a list, or the "
                    "optimizers that it makes: [torch.optim.AdamW(model.parameters())]."
                )
            if not isinstance(each, torch.optim.Optimizer):
                raise _no_optimizer(f"optimizer[{number}]", each)
            _check_parameters(model, each)
    elif optimizer is not None:
        if not callable(optimizer):
            raise _no_optimizer("optimizer", optimizer)
        if failure := cannot_take(optimizer, 1):
            raise TypeError(
                f"optimizer {name_of(optimizer)} cannot be called with parameters alone: "
                f"{failure}. Give a function that makes one: "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters)."
            )


def _no_optimizer(name: str, value: object) -> TypeError:
    classes = {
        known.lower(): known
        for known in dir(torch.optim)
        if isinstance(getattr(torch.optim, known), type)
    }
    example = f"torch.optim.{classes.get(str(value).lower(), 'AdamW')}"
    return TypeError(
        f"{name} must be an optimizer of the model, or a function from parameters to one, got "
        f"{described(value)}. Give {example}(model.parameters()), or {example} alone."
    )


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if number := _num_foreign(optimizer, model):
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} has {_parameters(number)}, and none is the "
            "model's. Give one that was made of model.parameters(), or a function that makes one."
        )


def _wrong_with_optimizer(returned: object, model: nn.Module) -> str | None:
    """Why a value that a function returned is no optimizer of a model; None if it is one."""
    if not isinstance(returned, torch.optim.Optimizer):
        return (
            f"returned {described(returned)}; it must return an optimizer. Give one that does: "
            "optimizer=lambda parameters: torch.optim.AdamW(parameters)."
        )
    number = _num_foreign(returned, model)
    if not number:
        return None
    return (
        f"returned {described(returned)} of {_parameters(number)}, none of which was passed to the "
        "function. Let the function use the parameters that it gets: "
        f"optimizer=lambda parameters: {type(returned).__name__}(parameters)."
    )


def _num_foreign(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """How many parameters an optimizer has, if none of them is the model's; else 0."""
    own = {id(parameter) for parameter in model.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return 0 if any(id(parameter) in own for parameter in parameters) else len(parameters)


def _parameters(number: int) -> str:
    return f"{number} parameter{'' if number == 1 else 's'}"
