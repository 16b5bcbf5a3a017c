"""Lightning's manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memcallback.core.phase_spans import (
    PhaseSpans,
    begin_backward,
    begin_update,
    end_backward,
    end_manual_step,
    end_update,
)
from memcallback.core.types import Phase
from memcallback.step.lightning_loop import LightningLoop
from memcallback.step.training_step import TrainingStep
from memcallback.trace.loops.passes import Copies, autocast


def step_by_hand(step: TrainingStep, copies: Copies, lightning: LightningLoop) -> None:
    """A LightningModule that calls `manual_backward` and its optimizers itself; its phases are
    marked by what `MemoryCallback` is told.
    """
    marks, module = copies.marks, copies.model
    phases = PhaseSpans(marks.boundary)

    def manual_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        scaled = copies.scaler.scale(loss) if copies.scaler else loss
        begin_backward(phases)
        before = marks.runs(Phase.BACKWARD)
        lightning.backward(module, scaled, *args, **kwargs)
        marks.runs(before)
        end_backward(phases, is_manual=True)

    def update(optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Lightning's `Precision.optimizer_step`, and that of `MixedPrecision` with a scaler."""

        def then_begin() -> Any:
            result = closure()
            begin_update(phases, is_manual=True)
            return result

        if copies.scaler is None:
            return optimizer.step(closure=then_begin, **kwargs)
        closure()
        marks.runs(Phase.OPTIMIZER_STEP)
        copies.scaler.unscale_(optimizer)
        begin_update(phases, is_manual=True)
        result = copies.scaler.step(optimizer, **kwargs)
        copies.scaler.update()
        marks.runs(Phase.FORWARD)
        return result

    with marks.step():
        batch = copies.new_batch()
        phases.open_phase(Phase.FORWARD)
        marks.runs(Phase.FORWARD)
        with (
            _updates_marked(copies, phases),
            lightning.manual(module, copies.optimizers, manual_backward, update),
            autocast(step, copies),
        ):
            lightning.training_step(module, batch)
        end_manual_step(phases)
        phases.end_step()
        marks.runs(None)
        marks.add_windows(phases.windows)
        del batch


@contextmanager
def _updates_marked(copies: Copies, phases: PhaseSpans) -> Iterator[None]:
    """Mark where updates of the optimizers begin and end, whoever makes them."""
    marks = copies.marks

    def begins(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        begin_update(phases, is_manual=True)
        marks.runs(Phase.OPTIMIZER_STEP)
        return tuple(map(with_phase, args)), {
            name: with_phase(value) for name, value in kwargs.items()
        }

    def with_phase(closure: Any) -> Any:
        """A closure, which runs the forward pass."""
        if not callable(closure):
            return closure

        def run() -> Any:
            before = marks.runs(Phase.FORWARD)
            result = closure()
            marks.runs(before)
            return result

        return run

    def ends(optimizer: torch.optim.Optimizer, *_: object) -> None:
        marks.label_states((optimizer,))
        end_update(phases, is_manual=True)
        marks.runs(Phase.FORWARD)

    hooks: list[Any] = []
    for optimizer in copies.optimizers:
        hooks += [optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(ends)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
