"""The parts of an update in a plain loop: loss, backward pass, and what comes after it.

A function of the whole update that is compiled is cut by PyTorch at the backward pass: what is
before it and what is after it are compiled, each by itself. With compiled autograd, the backward
pass is compiled as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from memcallback.core.errors import PredictionError
from memcallback.core.validation import described, name_of
from memcallback.step.training_step import CompileUpdate

#: What compiled parts are called in caveats.
_NAME = "the whole update"
_GIVE_COMPILE = "Give torch.compile, or functools.partial(torch.compile, mode=...)."
#: Stands for the file of compiled parts: code in files of this package is never compiled.
_FILE = "<whole update>"


def _loss(loss: Callable[..., Any], model: Any, batch: Any) -> Any:
    return loss(model, batch)


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


def _update(
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
    clip_grad_norm: float | None,
    clip_grad_value: float | None,
) -> None:
    """Clip and update with some optimizers, one after the other."""
    for optimizer in optimizers:
        if scaler is not None and (clip_grad_norm is not None or clip_grad_value is not None):
            scaler.unscale_(optimizer)
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        if clip_grad_value is not None:
            nn.utils.clip_grad_value_(parameters, clip_grad_value)
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler is not None:
        scaler.update()


class Parts(NamedTuple):
    """Functions that run the parts of an update.

    Attributes:
        loss: Takes the step's loss, the model and the batch.
        backward: Takes the loss tensor.
        update: Takes optimizers, the scaler or None, and the largest norm and value of gradients.
    """

    loss: Callable[..., Any] = _loss
    backward: Callable[..., None] = _backward
    update: Callable[..., None] = _update


def compiled_parts(compile_update: CompileUpdate) -> Parts:
    """The parts of a whole update that is compiled."""
    # Of `_backward` nothing is compiled. With compiled autograd, its call compiles the pass.
    parts = []
    for part in (_named(_loss), _backward, _named(_update)):
        try:
            compiled = compile_update(part)
        except Exception as error:  # a user's function can fail in any way
            raise PredictionError(
                f"compile_update {name_of(compile_update)} failed: {type(error).__name__}: "
                f"{error}. {_GIVE_COMPILE}"
            ) from error
        if not callable(compiled):
            raise PredictionError(
                f"compile_update {name_of(compile_update)} must return the compiled function, got "
                f"{described(compiled)}. {_GIVE_COMPILE}"
            )
        parts.append(compiled)
    return Parts(*parts)


def _named(part: Any) -> Callable[..., Any]:
    """The same function, with the name and the file of compiled parts."""
    code = part.__code__.replace(co_filename=_FILE)
    named = FunctionType(code, part.__globals__, part.__name__, part.__defaults__)
    named.__qualname__ = _NAME
    return named
