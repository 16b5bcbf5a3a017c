"""The loss of a step: the default one, and checks of a user's function and of what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from memcallback.core.tensors import tensors_in
from memcallback.core.torch_private import DisableTorchFunction, LossBase
from memcallback.core.validation import cannot_take, described, kind_of, name_of

#: A function of the model and the batch that returns the loss.
Loss = Callable[[Any, Any], torch.Tensor]
#: The caveat of a step without a loss whose model returns none either.
_SUM = (
    "No loss was given and the model returns none, so the sum of its outputs was taken. Your own "
    "may need more memory: cross-entropy over a large vocabulary keeps several tensors of the "
    "outputs' size. Give loss=lambda model, batch: ..."
)


def default_loss(
    model: nn.Module, batch: Any, assumed: dict[str, None] | None = None
) -> torch.Tensor:
    """The `loss` that the model returns (as transformers do for labels), or the outputs' sum.

    For a sum there is a caveat, which `assumed` gets.
    """
    returned = model(**batch) if is_passed_by_name(model, batch) else model(batch)
    loss = (
        returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    )
    if isinstance(loss, torch.Tensor):
        return loss
    outputs = [tensor for tensor in tensors_in(returned) if tensor.is_floating_point()]
    if not outputs:
        raise ValueError(
            "The model returned no floating-point tensor, so there is nothing to train. "
            "Give loss=lambda model, batch: ..."
        )
    is_loss = len(outputs) == 1 and outputs[0].numel() == 1
    if assumed is not None and not is_loss:
        assumed[_SUM] = None
    return torch.stack([output.sum() for output in outputs]).sum()


def saying_if_summed(loss: Loss, assumed: dict[str, None]) -> Loss:
    """A loss; the default one then adds a caveat to `assumed` if it sums outputs."""
    is_default: bool = loss is default_loss
    return partial(default_loss, assumed=assumed) if is_default else loss


def is_passed_by_name(model: nn.Module, batch: Any) -> bool:
    """Whether a batch is a mapping whose keys are arguments of the model's `forward`."""
    if not isinstance(batch, Mapping):
        return False
    try:
        signature = inspect.signature(model.forward)
        signature.bind(**batch)
    except (TypeError, ValueError):  # other arguments, or an unknown signature
        return False
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return True
    # A wrapper, as of PEFT, takes anything: what it wraps decides.
    wrapped = list(model.children())
    return len(wrapped) == 1 and is_passed_by_name(wrapped[0], batch)


def check_losses(loss: object) -> None:
    """Check that a loss, or each of several, can be called with a model and a batch."""
    if not isinstance(loss, Sequence) or isinstance(loss, (str, bytes)):
        _check_loss("loss", loss)
        return
    if not loss:
        raise ValueError(
            "loss is an empty list. Give one function of the model and the batch, or leave it out "
            "for the sum of what the model returns."
        )
    for number, each in enumerate(loss):
        _check_loss(f"loss[{number}]", each)


def _check_loss(name: str, loss: object) -> None:
    criterion = loss if isinstance(loss, type) else type(loss)
    if (
        issubclass(criterion, LossBase)
        or getattr(loss, "__module__", None) == "torch.nn.functional"
    ):
        is_class = criterion is loss or isinstance(loss, nn.Module)
        criterion_name = criterion.__name__ if is_class else name_of(loss)
        call = f"{criterion_name}()" if is_class else criterion_name
        raise TypeError(
            f"{name} is {criterion_name}, which compares outputs with targets; here a loss is "
            "called with the model and the batch. Give "
            f"loss=lambda model, batch: {call}(model(batch[0]), batch[1])."
        )
    if isinstance(loss, type) or not callable(loss):
        raise TypeError(
            f"{name} must be a function of the model and the batch that returns the loss, got "
            f"{described(loss)}. Give loss=lambda model, batch: ..."
        )
    if failure := cannot_take(loss, 2):
        raise TypeError(
            f"{name} {name_of(loss)} cannot be called with the model and the batch: {failure}. "
            "Give loss=lambda model, batch: ..."
        )


def wrong_with_loss(returned: object, model: nn.Module, *, is_lightning: bool) -> str | None:
    """Why a returned value is no loss: the value, the rule and the hint; None if it is one."""
    if isinstance(returned, torch.Tensor):
        wrong = _wrong_with_tensor(returned, model)
        if wrong is None:
            return None
    else:
        wrong = _no_tensor(returned, is_lightning=is_lightning)
    value, hint = wrong
    return (
        f"returned {value}; it must return the loss of the batch, a scalar tensor that requires "
        f"grad. {hint}"
    )


def _wrong_with_tensor(loss: torch.Tensor, model: nn.Module) -> tuple[str, str] | None:
    with DisableTorchFunction():
        shape, dtype, requires_grad = tuple(loss.shape), loss.dtype, loss.requires_grad
    if any(size != 1 for size in shape):
        return f"a tensor of shape {shape}", "Reduce it, such as with .mean()."
    if requires_grad:
        return None
    if not (dtype.is_floating_point or dtype.is_complex):
        return f"a tensor of {dtype}", "Return a floating-point one."
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        plural = "" if len(parameters) == 1 else "s"
        hint = (
            f"None of the model's {len(parameters)} parameter{plural} requires grad: set "
            "requires_grad of those that are to be trained."
        )
    else:
        hint = (
            "Leave out .detach(), torch.no_grad() and the like on the way from the parameters "
            "to it."
        )
    return "a tensor that does not require grad", hint


def _no_tensor(returned: object, *, is_lightning: bool) -> tuple[str, str]:
    hint = "Return that tensor."
    if is_lightning:
        hint = "Return that tensor, alone or in a dict under 'loss'."
    hint_of_several = "Return the tensor in it that is the loss."
    if isinstance(returned, (bool, int, float)):
        # Without its value: on fake tensors that is a placeholder.
        return kind_of(returned), "Return the tensor itself, without .item() or float()."
    if isinstance(returned, (Mapping, list, tuple)) and not returned:
        return f"an empty {type(returned).__name__}", hint
    if isinstance(returned, Mapping):
        if is_lightning and returned.get("loss") is not None:
            value, hint = _no_tensor(returned["loss"], is_lightning=True)
            return f"{described(returned)} with {value} under 'loss'", hint
        if any(isinstance(value, torch.Tensor) for value in returned.values()):
            hint = hint_of_several
        return f"{described(returned)} of {', '.join(map(repr, returned))}", hint
    if isinstance(returned, (list, tuple)):
        return f"{described(returned)} of {len(returned)}", hint_of_several
    return described(returned), hint
