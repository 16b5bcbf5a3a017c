"""Lightning's manual optimization: the module calls `manual_backward` and its optimizers itself."""

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
from memcallback.trace.loops.passes import Training

#: After so many batches without an update none is expected.
_MOST_BATCHES = 16


def manual_steps(training: Training, lightning: LightningLoop) -> None:
    """Run `training_step` until an optimizer makes an update, as at every n-th batch."""
    if training.makes_no_update or not training.optimizers:
        _manual_step(training, lightning, 0)
        return
    training.makes_no_update = not any(
        _manual_step(training, lightning, number) for number in range(_MOST_BATCHES)
    )


def _manual_step(training: Training, lightning: LightningLoop, number: int) -> bool:
    """Run one batch, with phases from the same signals as `MemoryCallback` gets.

    Tells whether an optimizer has made an update.
    """
    num_updates = training.num_updates
    marks, module, scaler = training.marks, training.model, training.scaler
    phases = PhaseSpans(marks.boundary)

    def manual_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        scaled = training.scaled(loss)
        begin_backward(phases)
        before = marks.set_phase(Phase.BACKWARD)
        lightning.backward(module, scaled, *args, **kwargs)
        marks.set_phase(before)
        end_backward(phases, is_manual=True)

    def update(optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Lightning's `Precision.optimizer_step`, or that of `MixedPrecision` with a scaler."""

        def closure_and_begin() -> Any:
            result = closure()
            begin_update(phases, is_manual=True)
            return result

        if scaler is None:
            return optimizer.step(closure=closure_and_begin, **kwargs)
        closure()
        marks.set_phase(Phase.OPTIMIZER_STEP)
        scaler.unscale_(optimizer)
        begin_update(phases, is_manual=True)
        result = scaler.step(optimizer, **kwargs)
        scaler.update()
        marks.set_phase(Phase.FORWARD)
        return result

    with marks.step():
        batch = training.new_batch()
        phases.open_phase(Phase.FORWARD)
        marks.set_phase(Phase.FORWARD)
        with (
            _updates_marked(training, phases),
            lightning.manual(module, training.optimizers, manual_backward, update),
            training.autocast(),
        ):
            lightning.training_step(module, batch, number)
        end_manual_step(phases)
        phases.end_step()
        marks.set_phase(None)
        marks.add_windows(phases.windows)
        del batch
    return training.num_updates > num_updates


@contextmanager
def _updates_marked(training: Training, phases: PhaseSpans) -> Iterator[None]:
    """Mark each optimizer's updates, whoever calls them."""
    marks = training.marks

    def begin(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        begin_update(phases, is_manual=True)
        marks.set_phase(Phase.OPTIMIZER_STEP)
        named = {name: with_phase(value) for name, value in kwargs.items()}
        return tuple(map(with_phase, args)), named

    def with_phase(closure: Any) -> Any:
        """A closure that sets the phase of the forward pass in it; other arguments as they are."""
        if not callable(closure):
            return closure

        def run() -> Any:
            before = marks.set_phase(Phase.FORWARD)
            result = closure()
            marks.set_phase(before)
            return result

        return run

    def end(optimizer: torch.optim.Optimizer, *_: object) -> None:
        training.num_updates += 1
        marks.label_states((optimizer,))
        end_update(phases, is_manual=True)
        marks.set_phase(Phase.FORWARD)

    hooks: list[Any] = []
    for optimizer in training.optimizers:
        hooks += [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
