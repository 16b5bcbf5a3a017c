"""Validate what a user passes to TrainingStep; warn about ambiguous batches and multi-device
models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memcallback.core.errors import warn_and_go_on
from memcallback.core.tensors import tensors_in
from memcallback.core.validation import MIN_SEQUENCE_LENGTH, described, kind_of, whole_number
from memcallback.step.batch import infer_batch_size

#: A function of the model and the batch that returns the loss.
Loss = Callable[[Any, Any], torch.Tensor]


def warn_of_batch(batch: object, batch_size: int | None, name: str) -> None:
    """Say what the batch size cannot be inferred from, or that it was guessed."""
    if batch_size is not None:
        return
    found = infer_batch_size(batch)
    if found.batch_size is None:
        warn_and_go_on(
            f"The batch size cannot be inferred from a batch of type {type(batch).__name__}: no tensor in it has a first dimension. Memory is "
            f"recorded, but not predicted, and no batch size is suggested. Give it: {name}(batch_size=32)."
        )
    elif found.is_ambiguous:
        warn_and_go_on(
            f"The tensors of the batch differ in their first dimension; {found.batch_size}, the most frequent, is taken for the batch size. "
            f"If that is wrong, give it: {name}(batch_size=32)."
        )


def warn_of_devices(model: torch.nn.Module, device: torch.device) -> None:
    """Say that a model is on several devices, of which one is recorded."""
    devices = devices_of(model)
    if len(devices) > 1:
        warn_and_go_on(
            f"The model's parameters are on {len(devices)} devices ({', '.join(devices)}); memory of {device} alone is recorded, and the "
            "prediction counts the parameters there. Record the others with a MemoryRecorder(device=...) each."
        )


def devices_of(model: torch.nn.Module) -> list[str]:
    """The devices of a model's parameters."""
    return sorted({str(parameter.device) for parameter in model.parameters()})


def check_losses(loss: object) -> None:
    """See that a loss, or each of several, is a function that can be called with a model and a
    batch.
    """
    if not _is_list(loss):
        _check_loss("loss", loss)
        return
    if not loss:
        raise ValueError(
            "loss is an empty list. Give one function of the model and the batch, or leave it out for the sum of what the model returns."
        )
    for number, one in enumerate(loss):  # type: ignore[arg-type, var-annotated]
        _check_loss(f"loss[{number}]", one)


def _check_loss(name: str, loss: object) -> None:
    criterion = loss if isinstance(loss, type) else type(loss)
    if (
        issubclass(criterion, nn.modules.loss._Loss)
        or getattr(loss, "__module__", None) == "torch.nn.functional"
    ):
        made = (
            criterion.__name__
            if criterion is loss or isinstance(loss, nn.Module)
            else name_of(loss)
        )
        called = f"{made}()" if isinstance(loss, (type, nn.Module)) else made
        raise TypeError(
            f"{name} is {made}, which compares outputs with targets; here a loss is called with the model and the batch. Give "
            f"loss=lambda model, batch: {called}(model(batch[0]), batch[1])."
        )
    if isinstance(loss, type) or not callable(loss):
        raise TypeError(
            f"{name} must be a function of the model and the batch that returns the loss, got {described(loss)}. Give "
            "loss=lambda model, batch: ..."
        )
    if failure := _cannot_take(loss, 2):
        raise TypeError(
            f"{name} {name_of(loss)} cannot be called with the model and the batch: {failure}. Give loss=lambda model, batch: ..."
        )


def check_optimizers(model: nn.Module, optimizer: object) -> None:
    """See that optimizers are some of the model's, or a function that can be called with
    parameters.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_parameters(model, optimizer)
    elif _is_list(optimizer):
        for number, one in enumerate(optimizer):  # type: ignore[arg-type, var-annotated]
            if callable(one):
                raise TypeError(
                    f"optimizer[{number}] is {name_of(one)}, which makes an optimizer; a list must hold optimizers of the model. Give "
                    "it alone, not in a list, or the optimizers that it makes: [torch.optim.AdamW(model.parameters())]."
                )
            if not isinstance(one, torch.optim.Optimizer):
                raise _no_optimizer(f"optimizer[{number}]", one)
            _check_parameters(model, one)
    elif optimizer is not None:
        if not callable(optimizer):
            raise _no_optimizer("optimizer", optimizer)
        if failure := _cannot_take(optimizer, 1):
            raise TypeError(
                f"optimizer {name_of(optimizer)} cannot be called with parameters alone: {failure}. Give a function that makes one: "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters)."
            )


def _no_optimizer(name: str, given: object) -> TypeError:
    known = {
        known.lower(): known
        for known in dir(torch.optim)
        if isinstance(getattr(torch.optim, known), type)
    }
    example = f"torch.optim.{known.get(str(given).lower(), 'AdamW')}"
    return TypeError(
        f"{name} must be an optimizer of the model, or a function from parameters to one, got {described(given)}. Give "
        f"{example}(model.parameters()), or {example} alone."
    )


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    num_given = _num_foreign(optimizer, model)
    if num_given:
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} has {_parameters(num_given)}, and none is the model's. Give one that was made of "
            "model.parameters(), or a function that makes one."
        )


def _num_foreign(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """How many parameters an optimizer has, if none of them is the model's; else 0."""
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return 0 if any(id(parameter) in own for parameter in given) else len(given)


def wrong_with_optimizer(returned: object, model: nn.Module) -> str | None:
    """What keeps the returned value of a function from being an optimizer of a model; None if
    nothing does.
    """
    if not isinstance(returned, torch.optim.Optimizer):
        return (
            f"returned {described(returned)}; it must return an optimizer. Give one that does: "
            "optimizer=lambda parameters: torch.optim.AdamW(parameters)."
        )
    num_given = _num_foreign(returned, model)
    if not num_given:
        return None
    return (
        f"returned {described(returned)} of {_parameters(num_given)}, and none is among those that it was called with. Make it of these: "
        f"optimizer=lambda parameters: {type(returned).__name__}(parameters)."
    )


def _parameters(number: int) -> str:
    return f"{number} parameter{'' if number == 1 else 's'}"


def check_manual_optimization(
    *, accumulate: object, clip_grad_norm: object, clip_grad_value: object
) -> None:
    """See that a LightningModule with manual optimization is asked for nothing that only automatic
    optimization does.
    """
    given = {
        "clip_grad_norm": clip_grad_norm,
        "clip_grad_value": clip_grad_value,
        "accumulate": None if accumulate == 1 else accumulate,
    }
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} with manual optimization is not known: the training_step says itself when it clips and updates, and Lightning "
                "refuses it too. Leave it out."
            )


def check_sequence_length(sequence_length: object, batch: object) -> int:
    """See that a sequence length is long enough and one that the batch has."""
    hint = "Give the length of the batch's sequences, or leave it out."
    length = whole_number(
        "sequence_length",
        sequence_length,
        f"Shorter ones are traced to tell of others. {hint}",
        least=MIN_SEQUENCE_LENGTH,
    )
    sizes = {size for tensor in tensors_in(batch) for size in tensor.shape[1:]}
    if length not in sizes:
        found = (
            f"these have sizes {', '.join(map(str, sorted(sizes)))}" if sizes else "there are none"
        )
        raise ValueError(
            f"sequence_length {length} must be the size of a dimension after the first of a tensor in the batch, and {found}. {hint}"
        )
    return length


def wrong_with_loss(returned: object, model: nn.Module, *, is_lightning: bool) -> str | None:
    """What keeps a returned value from being a loss: what it is, the rule and the way out; None if
    nothing does.
    """
    if isinstance(returned, torch.Tensor):
        wrong = _wrong_with_tensor(returned, model)
        if wrong is None:
            return None
    else:
        wrong = _no_tensor(returned, is_lightning=is_lightning)
    what, hint = wrong
    return f"returned {what}; it must return the loss of the batch, a scalar tensor that requires grad. {hint}"


def _wrong_with_tensor(loss: torch.Tensor, model: nn.Module) -> tuple[str, str] | None:
    with torch._C.DisableTorchFunction():
        shape, dtype, requires_grad = tuple(loss.shape), loss.dtype, loss.requires_grad
    if any(size != 1 for size in shape):
        return f"a tensor of shape {shape}", "Reduce it, such as with .mean()."
    if requires_grad:
        return None
    if not (dtype.is_floating_point or dtype.is_complex):
        return f"a tensor of {dtype}", "Return a floating-point one."
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        hint = f"None of the model's {_parameters(len(parameters))} requires grad: set requires_grad of those that are to be trained."
    else:
        hint = "Leave out .detach(), torch.no_grad() and the like on the way from the parameters to it."
    return "a tensor that does not require grad", hint


def _no_tensor(returned: object, *, is_lightning: bool) -> tuple[str, str]:
    alone = (
        "Return that tensor, alone or in a dict under 'loss'."
        if is_lightning
        else "Return that tensor."
    )
    if isinstance(returned, (bool, int, float)):
        # Not its value: on fakes that is a stand-in.
        return kind_of(returned), "Return the tensor itself, without .item() or float()."
    if isinstance(returned, Mapping):
        if is_lightning and returned.get("loss") is not None:
            what, hint = _no_tensor(returned["loss"], is_lightning=True)
            return f"{described(returned)} with {what} under 'loss'", hint
        kind = type(returned).__name__
        if not returned:
            return f"an empty {kind}", alone
        has_tensors = any(isinstance(value, torch.Tensor) for value in returned.values())
        return (
            f"{described(returned)} of {', '.join(map(repr, returned))}",
            "Return the tensor in it that is the loss." if has_tensors else alone,
        )
    if isinstance(returned, (list, tuple)):
        if not returned:
            return f"an empty {type(returned).__name__}", alone
        return (
            f"{described(returned)} of {len(returned)}",
            "Return the tensor in it that is the loss.",
        )
    return described(returned), alone


def name_of(function: object) -> str:
    """What a function or class is called."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__name__


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _cannot_take(function: Callable[..., Any], num_arguments: int) -> str | None:
    """Why a function cannot be called with so many arguments; None if it can, or does not say."""
    try:
        # Not that of what it wraps, to which it may give more.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*(None,) * num_arguments)
    except TypeError as error:
        return str(error)
    return None
