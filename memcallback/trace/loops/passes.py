"""Forward, backward, update, zero_grad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from memcallback.core.errors import PredictionError
from memcallback.core.phase_spans import PhaseSpan
from memcallback.core.types import Phase
from memcallback.step.loss import wrong_with_loss
from memcallback.step.training_step import TrainingStep


class Marks(Protocol):
    """Is told where steps and phases begin and end."""

    def step(self) -> AbstractContextManager[None]:
        """A step is inside the context."""

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """A phase is inside the context."""

    def runs(self, phase: Phase | None) -> Phase | None:
        """What follows belongs to a phase whose window is told later, None for none; returns what
        it was before.
        """

    def boundary(self) -> None:
        """A boundary between phases that are told later is here."""

    def add_windows(self, windows: Sequence[PhaseSpan]) -> None:
        """Which boundaries since the last windows are those of which phases, by their numbers from
        0.
        """

    def label_states(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An update was made."""


@dataclass
class Copies:
    """What the loop runs on, none of it the user's.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
        new_batch: Makes the next batch, as it comes to the device.
        marks: Is told what goes on.
        device_type: `cuda` or `cpu`: where autocast is.
        scaler: Made at the first use of a half-precision loss scale, and kept.
    """

    model: Any
    optimizers: tuple[torch.optim.Optimizer, ...]
    new_batch: Callable[[], Any]
    marks: Marks
    device_type: str
    scaler: torch.amp.GradScaler | None = field(default=None)


def forward(step: TrainingStep, copies: Copies, batch: Any, number: int = 0) -> Any:
    """The forward pass to one of the losses."""
    with copies.marks.phase(Phase.FORWARD):
        with autocast(step, copies):
            loss = step.losses[number](copies.model, batch)
        if wrong := wrong_with_loss(loss, copies.model, is_lightning=step.lightning is not None):
            name = (
                "training_step"
                if step.lightning
                else "loss"
                if len(step.losses) == 1
                else f"loss[{number}]"
            )
            raise PredictionError(f"{name} {wrong}")
        return loss / step.accumulate if step.accumulate > 1 and not step.has_accumulation else loss


def backward(step: TrainingStep, copies: Copies, loss: torch.Tensor) -> None:
    """The backward pass from a loss, scaled where a half-precision step has that."""
    with copies.marks.phase(Phase.BACKWARD):
        if step.accumulate > 1 and step.has_accumulation:
            loss = loss / step.accumulate
        # The scaled loss goes with the call.
        if step.lightning:
            step.lightning.backward(copies.model, _scaled(copies, loss))
        else:
            _scaled(copies, loss).backward()


def _scaled(copies: Copies, loss: torch.Tensor) -> torch.Tensor:
    return copies.scaler.scale(loss) if copies.scaler else loss


def update(step: TrainingStep, copies: Copies, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """An update by some optimizers, as a phase."""
    with copies.marks.phase(Phase.OPTIMIZER_STEP):
        update_all(step, copies, optimizers)


def update_all(
    step: TrainingStep, copies: Copies, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """An update by some optimizers, one after the other, after clipping, inside a phase that others
    mark.
    """
    scaler = copies.scaler
    for optimizer in optimizers:
        if scaler and (
            step.clip_grad_norm is not None
            or step.clip_grad_value is not None
            or step.lightning is not None
        ):
            scaler.unscale_(optimizer)
        _clip(step, copies, optimizer)
        if scaler:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler:
        scaler.update()
    copies.marks.label_states(optimizers)


def _clip(step: TrainingStep, copies: Copies, optimizer: torch.optim.Optimizer) -> None:
    if step.lightning:
        step.lightning.clip_gradients(
            copies.model, optimizer, step.clip_grad_norm, step.clip_grad_value
        )
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if step.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(parameters, step.clip_grad_norm)
    if step.clip_grad_value is not None:
        nn.utils.clip_grad_value_(parameters, step.clip_grad_value)


def zero_grad(step: TrainingStep, copies: Copies) -> None:
    """Let go of the gradients: those of the optimizers' parameters, without optimizers those of the
    model.
    """
    for optimizer in copies.optimizers:
        if step.lightning:
            step.lightning.zero_grad(copies.model, optimizer)
        else:
            optimizer.zero_grad(set_to_none=True)
    if not copies.optimizers:
        copies.model.zero_grad(set_to_none=True)


def autocast(step: TrainingStep, copies: Copies) -> AbstractContextManager[Any]:
    """Autocast as the step's precision has it."""
    if step.autocast_dtype is None:
        return nullcontext()
    is_cached = step.lightning is None or step.lightning.autocast_cache_enabled(copies.model)
    return torch.autocast(copies.device_type, dtype=step.autocast_dtype, cache_enabled=is_cached)
