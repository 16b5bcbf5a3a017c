"""Runs a training up to its next optimizer update, whatever its loop is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.types import Phase
from memcallback.step.pipeline import Pipeline
from memcallback.trace.loops.manual import manual_steps
from memcallback.trace.loops.passes import Training
from memcallback.trace.loops.pipeline import pipelined_step
from memcallback.trace.loops.repeats import Repeats
from memcallback.trace.marks import TraceMarks


def run_window(training: Training) -> None:
    """Run the steps up to and including one optimizer update."""
    step, optimizers = training.step, training.optimizers
    if step.lightning is not None and not training.model.automatic_optimization:
        manual_steps(training, step.lightning)
    elif isinstance(training.model, Pipeline):
        pipelined_step(training, training.model)
    elif len(optimizers) == 1 and isinstance(optimizers[0], torch.optim.LBFGS):
        if step.accumulate > 1:
            raise PredictionError(
                f"accumulate={step.accumulate} with LBFGS is not supported: it runs the forward "
                "pass itself. Leave accumulate out."
            )
        if step.compile_update is not None:
            raise PredictionError(
                "compile_update with LBFGS is not supported: PyTorch does not compile the step of "
                "LBFGS, nor the passes in it. Leave compile_update out."
            )
        _closure_step(training)
    elif len(step.losses) > 1:
        _alternating_step(training)
    else:
        _accumulate(training)


def _accumulate(training: Training) -> None:
    """The batches of one update; those in the middle are repeated once they are all the same."""
    last, number = training.step.accumulate - 1, 0
    repeats = Repeats(training)
    loaded: list[Any] = []
    while number <= last:
        _automatic_step(training, loaded, is_first=number == 0, is_last=number == last)
        number += 1
        if 1 < number < last:
            number += repeats.after_middle_batch(last - number)
        elif number == 1:
            repeats.begin(last)


def _automatic_step(
    training: Training, loaded: list[Any], *, is_first: bool, is_last: bool
) -> None:
    """Forward, backward, and at the end of an accumulation window the update of all optimizers.

    The batch is the first of those that are loaded; they are loaded when none is left.
    """
    step = training.step
    with training.marks.step():
        if is_first and step.has_accumulation:
            training.zero_grad()
        if not loaded:
            loaded += training.new_batches(step.accumulate if step.loads_update_at_once else 1)
        batch = loaded.pop(0)
        if is_first and step.zero_grad_before_forward:
            training.zero_grad()
        loss = training.forward(batch)
        if is_first and not step.zero_grad_before_forward:
            training.zero_grad()
        training.backward(loss)
        if is_last and training.optimizers:
            with training.marks.phase(Phase.OPTIMIZER_STEP):
                training.update(training.optimizers)
        del loss, batch
        training.end_batch()


def _alternating_step(training: Training) -> None:
    """Several losses one after the other, each with an optimizer of its own (a GAN)."""
    with training.marks.step():
        batch = training.new_batch()
        for number, optimizer in enumerate(training.optimizers):
            optimizer.zero_grad(set_to_none=True)
            loss = training.forward(batch, number)
            training.backward(loss)
            with training.marks.phase(Phase.OPTIMIZER_STEP):
                training.update((optimizer,))
            del loss
        del batch


def _closure_step(training: Training) -> None:
    """An optimizer that runs the forward and backward passes itself, as often as it likes."""
    with training.marks.step():
        # No variable here: with the call the last reference to the batch ends.
        _update_with_closure(training, training.new_batch())
        training.end_batch()


def _update_with_closure(training: Training, batch: Any) -> None:
    (optimizer,) = training.optimizers
    phase = _OptimizerPhase(training.marks)

    def closure() -> Any:
        with phase.suspended():
            if training.step.zero_grad_before_forward:
                training.zero_grad()
            loss = training.forward(batch)
            if not training.step.zero_grad_before_forward:
                training.zero_grad()
            training.backward(loss)
        return loss

    with phase:
        optimizer.step(closure)
        training.marks.label_states((optimizer,))


class _OptimizerPhase:
    """Suspends the optimizer phase while a closure runs forward and backward, then resumes it."""

    def __init__(self, marks: TraceMarks) -> None:
        self._marks = marks
        self._phase: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._phase = self._marks.phase(Phase.OPTIMIZER_STEP)
        self._phase.__enter__()

    def __exit__(self, *exception: object) -> None:
        assert self._phase is not None
        self._phase.__exit__(None, None, None)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self.__exit__()
        yield
        self.__enter__()
