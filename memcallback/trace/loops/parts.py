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

from memcallback.step.training_step import CompileUpdate

#: How compiled parts are named in caveats, and what stands for their file: code in files of this
#: package is never compiled.
_NAME, _FILE = "the whole update", "<whole update>"


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
    return Parts(
        loss=compile_update(_named(_loss)),
        # Nothing is compiled of this one but, with compiled autograd, what the call runs.
        backward=compile_update(_backward),
        update=compile_update(_named(_update)),
    )


def _named(part: Any) -> Callable[..., Any]:
    """The same function, with the name and the file of compiled parts."""
    code = part.__code__.replace(co_filename=_FILE)
    named = FunctionType(code, part.__globals__, part.__name__, part.__defaults__)
    named.__qualname__ = _NAME
    return named
