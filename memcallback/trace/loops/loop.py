"""Run one optimizer window of a TrainingStep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.types import Phase
from memcallback.step.pipeline import Pipeline
from memcallback.step.training_step import TrainingStep
from memcallback.trace.loops.manual import step_by_hand
from memcallback.trace.loops.passes import Copies, Marks, backward, forward, update, zero_grad
from memcallback.trace.loops.pipeline import pipelined_step


def run_window(step: TrainingStep, copies: Copies) -> None:
    """Run the steps up to and including one optimizer update."""
    if step.uses_grad_scaler and copies.scaler is None:
        copies.scaler = torch.amp.GradScaler("cpu")
    if step.lightning is not None and not copies.model.automatic_optimization:
        step_by_hand(step, copies, step.lightning)
    elif isinstance(copies.model, Pipeline):
        pipelined_step(step, copies, copies.model)
    elif len(copies.optimizers) == 1 and isinstance(copies.optimizers[0], torch.optim.LBFGS):
        if step.accumulate > 1:
            raise PredictionError(
                f"accumulate={step.accumulate} with LBFGS is not known: it runs the forward pass itself. Leave accumulate out."
            )
        _closure_step(step, copies)
    elif len(step.losses) > 1:
        _alternating_step(step, copies)
    else:
        for micro_step in range(step.accumulate):
            _automatic_step(
                step, copies, is_first=micro_step == 0, is_last=micro_step == step.accumulate - 1
            )


def _automatic_step(step: TrainingStep, copies: Copies, *, is_first: bool, is_last: bool) -> None:
    """Forward, backward, and at the end of an accumulation window the update of all optimizers."""
    with copies.marks.step():
        if is_first and step.has_accumulation:
            zero_grad(step, copies)
        batch = copies.new_batch()
        if is_first and step.zero_grad_before_forward:
            zero_grad(step, copies)
        loss = forward(step, copies, batch)
        if is_first and not step.zero_grad_before_forward:
            zero_grad(step, copies)
        backward(step, copies, loss)
        if is_last and copies.optimizers:
            update(step, copies, copies.optimizers)
        del loss, batch


def _alternating_step(step: TrainingStep, copies: Copies) -> None:
    """Several losses, each with an optimizer of its own, one after the other (a GAN)."""
    with copies.marks.step():
        batch = copies.new_batch()
        for number, optimizer in enumerate(copies.optimizers):
            optimizer.zero_grad(set_to_none=True)
            loss = forward(step, copies, batch, number)
            backward(step, copies, loss)
            update(step, copies, (optimizer,))
            del loss
        del batch


def _closure_step(step: TrainingStep, copies: Copies) -> None:
    """An optimizer that runs the forward and backward passes itself, as often as it likes."""
    with copies.marks.step():
        _update_with_closure(step, copies, copies.new_batch())


def _update_with_closure(step: TrainingStep, copies: Copies, batch: Any) -> None:
    """The update, after which nothing holds the batch."""
    (optimizer,) = copies.optimizers
    phase = _Interrupted(copies.marks)

    def closure() -> Any:
        with phase.interrupted():
            if step.zero_grad_before_forward:
                zero_grad(step, copies)
            loss = forward(step, copies, batch)
            if not step.zero_grad_before_forward:
                zero_grad(step, copies)
            backward(step, copies, loss)
        return loss

    with phase:
        optimizer.step(closure)
        copies.marks.label_states((optimizer,))


class _Interrupted:
    """An optimizer phase with other phases inside: it is over before they begin, and begins anew
    after them.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._phase: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._start()

    def __exit__(self, *exception: object) -> None:
        self._end()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        self._end()
        yield
        self._start()

    def _start(self) -> None:
        self._phase = self._marks.phase(Phase.OPTIMIZER_STEP)
        self._phase.__enter__()

    def _end(self) -> None:
        assert self._phase is not None
        self._phase.__exit__(None, None, None)
