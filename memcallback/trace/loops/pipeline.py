"""Pipeline schedules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.phase_spans import PhaseSpans, begin_backward, begin_update, end_backward
from memcallback.core.types import Phase
from memcallback.step.hooks import listen
from memcallback.step.pipeline import Pipeline
from memcallback.step.training_step import TrainingStep
from memcallback.trace.loops.passes import Copies, Marks, autocast, update_all, zero_grad


def pipelined_step(step: TrainingStep, copies: Copies, pipeline: Pipeline) -> None:
    """The forward and backward passes of all microbatches, in the order of the pipeline's schedule,
    and an update.
    """
    if wrong := _not_in_pipeline(step, copies):
        raise PredictionError(f"A step in a pipeline with {wrong}")
    marks, phases = copies.marks, PhaseSpans(copies.marks.boundary)
    with marks.step():
        batch = copies.new_batch()
        zero_grad(step, copies)
        with _Microbatches(marks, phases).marked(pipeline), autocast(step, copies):
            _run_microbatches(step, pipeline, batch)
        if not phases.windows and phases.current_phase is None:
            raise PredictionError(
                "The step's loss ran no stage of the pipeline. Give loss=lambda schedule, batch: schedule.step(...) as on this rank."
            )
        if copies.optimizers:
            begin_update(phases, is_manual=True)
            marks.runs(Phase.OPTIMIZER_STEP)
            update_all(step, copies, copies.optimizers)
        phases.end_step()
        marks.runs(None)
        marks.add_windows(phases.windows)
        del batch


def _not_in_pipeline(step: TrainingStep, copies: Copies) -> str | None:
    """What of a step is not known in a pipeline, and the way out; None if all is."""
    if step.accumulate > 1:
        return f"accumulate={step.accumulate} is not known: its microbatches are what is accumulated. Leave it out, and give n_microbatches."
    if len(step.losses) > 1:
        return f"{len(step.losses)} losses is not known. Give one."
    if copies.scaler is not None:
        return f"precision {step.precision!r} is not known: a GradScaler sees the gradients of one stage alone. Give 'bf16-mixed'."
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in copies.optimizers):
        return "LBFGS is not known: it runs the forward pass itself. Give another optimizer."
    return None


def _run_microbatches(step: TrainingStep, pipeline: Pipeline, batch: Any) -> None:
    try:
        pipeline.step(step.loss, batch)
    except RuntimeError as error:
        # PyTorch hides what failed in a stage behind an error of its own.
        hides = any(
            text in str(error) for text in ("failed to run forward", "Failed to run stage backward")
        )
        raise (error.__cause__ if hides and error.__cause__ else error)  # noqa: B904


class _Microbatches:
    """Marks the passes of a pipeline's microbatches as a `Watch` does: a forward pass goes on until
    a backward pass begins.
    """

    def __init__(self, marks: Marks, phases: PhaseSpans) -> None:
        self._marks, self._phases, self._thread = marks, phases, threading.get_ident()
        # A mode of torch functions passes the call on to itself.
        self._depth = 0

    @contextmanager
    def marked(self, pipeline: Pipeline) -> Iterator[None]:
        """The passes inside are marked."""
        end = listen(self)
        hooks = [
            module.register_forward_pre_hook(self.forward_begins, prepend=True)
            for module in pipeline.stages
        ]
        try:
            yield
        finally:
            end()
            for hook in hooks:
                hook.remove()

    def forward_begins(self, *_: object) -> None:
        """A stage is called; without gradients for the shapes that it gives, and by checkpointing
        inside a backward pass.
        """
        if torch.is_grad_enabled() and self._phases.current_phase is None:
            self._phases.open_phase(Phase.FORWARD)
            self._marks.runs(Phase.FORWARD)

    def backward_begins(self) -> bool:
        """As `BackwardListener`."""
        if threading.get_ident() != self._thread:
            return False
        self._depth += 1
        if self._depth == 1:
            begin_backward(self._phases)
            self._marks.runs(Phase.BACKWARD)
        return True

    def backward_ends(self, *, is_interrupted: bool) -> None:
        """As `BackwardListener`."""
        self._depth -= 1
        if not self._depth:
            end_backward(self._phases, is_manual=False)
            self._marks.runs(None)
