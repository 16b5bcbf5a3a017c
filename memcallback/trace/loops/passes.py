"""A training that is traced, and its passes: forward, backward, update, zero_grad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.types import Phase
from memcallback.step.lightning_loop import LightningLoop
from memcallback.step.loss import Loss, saying_if_summed, wrong_with_loss
from memcallback.step.model import devices_of, unwrapping
from memcallback.step.step import Step
from memcallback.step.training_step import TrainingStep
from memcallback.trace.loops.parts import Parts, compiled_parts
from memcallback.trace.marks import TraceMarks


@dataclass
class Training:
    """A step with the copies that it runs on, none of which is the user's.

    Attributes:
        step: The step.
        model: The model.
        losses: Its losses.
        optimizers: Its optimizers.
        make_batches: Makes the next batches, on the device.
        marks: Marks steps and phases in the trace.
        device_type: `cuda` or `cpu`, for autocast.
        reads: A sentence for each line of code that has read a value which a trace does not know.
        assumed: The trace's caveats.
        scaler: Scales the loss of a half-precision step; None for no scaling.
        num_updates: Updates of optimizers in manual optimization so far.
        makes_no_update: Whether manual optimization went on for long without one.
    """

    step: TrainingStep
    model: Any
    losses: Sequence[Loss]
    optimizers: tuple[torch.optim.Optimizer, ...]
    make_batches: Callable[[int], list[Any]]
    marks: TraceMarks
    device_type: str
    reads: Iterable[str]
    assumed: dict[str, None]
    scaler: torch.amp.GradScaler | None = None
    num_updates: int = 0
    makes_no_update: bool = False

    def __post_init__(self) -> None:
        if self.step.uses_grad_scaler:
            self.scaler = torch.amp.GradScaler("cpu")
        compile_update = self.step.compile_update
        if compile_update is None:
            self._parts = Parts()
            self.losses = [saying_if_summed(loss, self.assumed) for loss in self.losses]
        else:  # PyTorch compiles the losses as they are
            self._parts = compiled_parts(compile_update)

    def new_batches(self, count: int) -> list[Any]:
        """The next batches, on the device."""
        if self.step.lightning is not None:
            self.step.lightning.begin_batch(self.model, self.device_type)
        return self.make_batches(count)

    def new_batch(self) -> Any:
        """The next batch, on the device."""
        return self.new_batches(1).pop()

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast as the step's precision has it, unless the model enters it itself."""
        return autocast(self.step, self.model, self.device_type)

    def forward(self, batch: Any, number: int = 0) -> Any:
        """The forward pass to one of the losses."""
        step = self.step
        with self.marks.phase(Phase.FORWARD):
            with self.autocast():
                loss = self._parts.loss(self.losses[number], self.model, batch)
            if wrong := wrong_with_loss(loss, self.model, is_lightning=step.lightning is not None):
                name = "loss" if len(self.losses) == 1 else f"loss[{number}]"
                name = "training_step" if step.lightning else name
                raise PredictionError(" ".join((f"{name} {wrong}", *self.reads)))
            # The undivided loss is let go within the phase.
            if step.lightning is not None:
                loss = step.lightning.divided(loss, step.accumulate)
            elif step.accumulate > 1 and not step.has_accumulation:
                loss = loss / step.accumulate
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a loss."""
        step = self.step
        with self.marks.phase(Phase.BACKWARD):
            if step.accumulate > 1 and step.has_accumulation:
                loss = loss / step.accumulate
            # No variable holds the scaled loss: it is freed with the call.
            if step.lightning:
                step.lightning.backward(self.model, self.scaled(loss))
            else:
                self._parts.backward(self.scaled(loss))

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled in a half-precision step."""
        return self.scaler.scale(loss) if self.scaler else loss

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Clip and update with some optimizers, one after the other; the caller marks the phase."""
        step = self.step
        if step.lightning is None:
            self._parts.update(optimizers, self.scaler, step.clip_grad_norm, step.clip_grad_value)
        else:
            self._update_as_lightning(step.lightning, optimizers)
        self.marks.label_states(optimizers)

    def _update_as_lightning(
        self, lightning: LightningLoop, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        step = self.step
        for optimizer in optimizers:
            if self.scaler:
                self.scaler.unscale_(optimizer)
            lightning.clip_gradients(
                self.model, optimizer, step.clip_grad_norm, step.clip_grad_value
            )
            if self.scaler:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler:
            self.scaler.update()

    def end_batch(self) -> None:
        """Let go of what the loop keeps until the end of a batch."""
        if self.step.lightning is not None:
            self.step.lightning.outputs = {}

    def zero_grad(self) -> None:
        """Free the gradients of all optimizers, or of the model if there is none."""
        for optimizer in self.optimizers:
            if self.step.lightning:
                self.step.lightning.zero_grad(self.model, optimizer)
            else:
                optimizer.zero_grad(set_to_none=True)
        if not self.optimizers:
            self.model.zero_grad(set_to_none=True)


def autocast(step: Step, model: Any, device_type: str) -> AbstractContextManager[Any]:
    """Autocast as a step's precision has it, unless the model enters it itself."""
    if step.autocast_dtype is None or _autocasts_itself(step, model, device_type):
        return nullcontext()
    return torch.autocast(
        device_type,
        dtype=step.autocast_dtype,
        cache_enabled=step.lightning is None or step.lightning.autocast_cache_enabled(model),
    )


def _autocasts_itself(step: Step, model: Any, device_type: str) -> bool:
    """Whether accelerate has prepared the model for autocast on this device.

    Autocast then ends with each call of the model, and with it the casts that it keeps, which
    carry no gradients after a call without.
    """
    is_prepared = any("_original_forward" in vars(one) for one in unwrapping(model))
    return is_prepared and all(name.startswith(device_type) for name in devices_of(step.model))
