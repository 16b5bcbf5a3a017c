"""One step of a pipeline: the passes of all microbatches in the order of PyTorch's schedule."""

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
from memcallback.trace.loops.passes import Training
from memcallback.trace.marks import TraceMarks


def pipelined_step(training: Training, pipeline: Pipeline) -> None:
    """Run forward and backward passes of all microbatches, and an update."""
    if wrong := _not_in_pipeline(training):
        raise PredictionError(f"A step in a pipeline with {wrong}")
    marks, phases = training.marks, PhaseSpans(training.marks.boundary)
    with marks.step():
        batch = training.new_batch()
        training.zero_grad()
        with _MicrobatchMarks(marks, phases).on(pipeline), training.autocast():
            _run_microbatches(training, pipeline, batch)
        if not phases.windows and phases.current_phase is None:
            raise PredictionError(
                "The step's loss ran no stage of the pipeline. "
                "Give loss=lambda schedule, batch: schedule.step(...), with the arguments that "
                "this rank passes in your program."
            )
        if training.optimizers:
            begin_update(phases, is_manual=True)
            marks.set_phase(Phase.OPTIMIZER_STEP)
            training.update(training.optimizers)
        phases.end_step()
        marks.set_phase(None)
        marks.add_windows(phases.windows)
        del batch


def _not_in_pipeline(training: Training) -> str | None:
    """An option of the step that is not supported in a pipeline, and the way out."""
    step = training.step
    if step.accumulate > 1:
        return (
            f"accumulate={step.accumulate} is not supported: a pipeline accumulates its "
            "microbatches. Leave it out, and give n_microbatches."
        )
    if len(step.losses) > 1:
        return f"{len(step.losses)} losses is not supported. Give one."
    if training.scaler is not None:
        return (
            f"precision {step.precision!r} is not supported: a GradScaler sees the gradients of "
            "one stage alone. Give 'bf16-mixed'."
        )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in training.optimizers):
        return "LBFGS is not supported: it runs the forward pass itself. Give another optimizer."
    return None


def _run_microbatches(training: Training, pipeline: Pipeline, batch: Any) -> None:
    try:
        pipeline.step(training.step.loss, batch)
        return
    except RuntimeError as error:
        # PyTorch hides what failed in a stage behind an error of its own.
        hiding = ("failed to run forward", "Failed to run stage backward")
        if error.__cause__ is None or not any(text in str(error) for text in hiding):
            raise
        hidden = error.__cause__
    raise hidden


class _MicrobatchMarks:
    """Marks the passes of microbatches as `Watch` does: a forward pass until a backward begins."""

    def __init__(self, marks: TraceMarks, phases: PhaseSpans) -> None:
        self._marks, self._phases, self._thread = marks, phases, threading.get_ident()
        # Calls of backward inside each other: a mode of torch functions calls it once more.
        self._depth = 0

    @contextmanager
    def on(self, pipeline: Pipeline) -> Iterator[None]:
        """Mark the passes of a pipeline's stages inside the context."""
        end = listen(self)
        hooks = [
            module.register_forward_pre_hook(self._forward_begins, prepend=True)
            for module in pipeline.stages
        ]
        try:
            yield
        finally:
            end()
            for hook in hooks:
                hook.remove()

    def _forward_begins(self, *_: object) -> None:
        # Not without gradients, when shapes are inferred, and not in a recomputed forward pass.
        if torch.is_grad_enabled() and self._phases.current_phase is None:
            self._phases.open_phase(Phase.FORWARD)
            self._marks.set_phase(Phase.FORWARD)

    def backward_begins(self) -> bool:
        """Mark the beginning of a backward pass of this thread."""
        if threading.get_ident() != self._thread:
            return False
        self._depth += 1
        if self._depth == 1:
            begin_backward(self._phases)
            self._marks.set_phase(Phase.BACKWARD)
        return True

    def backward_ends(self, *, is_interrupted: bool) -> None:
        """Mark its end."""
        self._depth -= 1
        if not self._depth:
            end_backward(self._phases, is_manual=False)
            self._marks.set_phase(None)
