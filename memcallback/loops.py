"""The training loop of a `TrainingStep`, in the order in which the real one runs, on copies and with marks around its phases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from memcallback.backward_calls import listen
from memcallback.events import Phase
from memcallback.lightning_step import LightningLoop
from memcallback.phase_windows import PhaseWindow, PhaseWindows, begin_backward, begin_update, end_backward, end_by_hand, end_update
from memcallback.pipelines import Pipeline
from memcallback.step_checks import wrong_with_loss
from memcallback.steps import PredictionError, TrainingStep


class Marks(Protocol):
    """Is told where steps and phases begin and end."""

    def step(self) -> AbstractContextManager[None]:
        """A step is inside the context."""

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """A phase is inside the context."""

    def runs(self, phase: Phase | None) -> Phase | None:
        """What follows belongs to a phase whose window is told later, None for none; returns what it was before."""

    def boundary(self) -> None:
        """A boundary between phases that are told later is here."""

    def add_windows(self, windows: Sequence[PhaseWindow]) -> None:
        """Which boundaries since the last windows are those of which phases, by their numbers from 0."""

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


def run_window(step: TrainingStep, copies: Copies) -> None:
    """Run the steps up to and including one optimizer update.

    Args:
        step: What a step is.
        copies: What to run on.
    """
    if step.uses_grad_scaler and copies.scaler is None:
        copies.scaler = torch.amp.GradScaler("cpu")
    if step.lightning is not None and not copies.model.automatic_optimization:
        _step_by_hand(step, copies, step.lightning)
    elif isinstance(copies.model, Pipeline):
        _pipelined_step(step, copies, copies.model)
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
            _automatic_step(step, copies, is_first=micro_step == 0, is_last=micro_step == step.accumulate - 1)


def _automatic_step(step: TrainingStep, copies: Copies, *, is_first: bool, is_last: bool) -> None:
    """Forward, backward, and at the end of an accumulation window the update of all optimizers."""
    with copies.marks.step():
        if is_first and step.has_accumulation:
            _zero_grad(copies)
        batch = copies.new_batch()
        if is_first and step.zero_grad_before_forward:
            _zero_grad(copies)
        loss = _forward(step, copies, batch)
        if is_first and not step.zero_grad_before_forward:
            _zero_grad(copies)
        _backward(step, copies, loss)
        if is_last and copies.optimizers:
            _update(step, copies, copies.optimizers)
        del loss, batch


def _alternating_step(step: TrainingStep, copies: Copies) -> None:
    """Several losses, each with an optimizer of its own, one after the other (a GAN)."""
    with copies.marks.step():
        batch = copies.new_batch()
        for number, optimizer in enumerate(copies.optimizers):
            optimizer.zero_grad(set_to_none=True)
            loss = _forward(step, copies, batch, number)
            _backward(step, copies, loss)
            _update(step, copies, (optimizer,))
            del loss
        del batch


def _closure_step(step: TrainingStep, copies: Copies) -> None:
    """An optimizer that runs the forward and backward passes itself, as often as it likes."""
    with copies.marks.step():
        _update_with_closure(step, copies, copies.new_batch())


def _update_with_closure(step: TrainingStep, copies: Copies, batch: Any) -> None:
    (optimizer,) = copies.optimizers
    update = _Interrupted(copies.marks)

    def closure() -> Any:
        with update.interrupted():
            if step.zero_grad_before_forward:
                _zero_grad(copies)
            loss = _forward(step, copies, batch)
            if not step.zero_grad_before_forward:
                _zero_grad(copies)
            _backward(step, copies, loss)
        return loss

    with update:
        optimizer.step(closure)
        copies.marks.label_states((optimizer,))


def _pipelined_step(step: TrainingStep, copies: Copies, pipeline: Pipeline) -> None:
    """The forward and backward passes of all microbatches, in the order of the pipeline's schedule, and an update."""
    if wrong := _not_in_pipeline(step, copies):
        raise PredictionError(f"A step in a pipeline with {wrong}")
    marks, phases = copies.marks, PhaseWindows(copies.marks.boundary)
    with marks.step():
        batch = copies.new_batch()
        _zero_grad(copies)
        with _Microbatches(marks, phases).marked(pipeline), _autocast(step, copies):
            _run_microbatches(step, pipeline, batch)
        if not phases.windows and phases.current_phase is None:
            raise PredictionError(
                "The step's loss ran no stage of the pipeline. Give loss=lambda schedule, batch: schedule.step(...) as on this rank."
            )
        if copies.optimizers:
            begin_update(phases, by_hand=True)
            marks.runs(Phase.OPTIMIZER_STEP)
            _update_all(step, copies, copies.optimizers)
        phases.end_step()
        marks.runs(None)
        marks.add_windows(phases.windows)
        del batch


def _not_in_pipeline(step: TrainingStep, copies: Copies) -> str | None:
    """What of a step is not known in a pipeline, and the way out; None if all is."""
    if step.accumulate > 1:
        return (
            f"accumulate={step.accumulate} is not known: its microbatches are what is accumulated. Leave it out, and give n_microbatches."
        )
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
        hides = any(text in str(error) for text in ("failed to run forward", "Failed to run stage backward"))
        raise (error.__cause__ if hides and error.__cause__ else error)  # noqa: B904


class _Microbatches:
    """Marks the passes of a pipeline's microbatches as a `Watch` does: a forward pass goes on until a backward pass begins."""

    def __init__(self, marks: Marks, phases: PhaseWindows) -> None:
        self._marks, self._phases, self._thread = marks, phases, threading.get_ident()
        # A mode of torch functions passes the call on to itself.
        self._depth = 0

    @contextmanager
    def marked(self, pipeline: Pipeline) -> Iterator[None]:
        """The passes inside are marked."""
        end = listen(self)
        hooks = [module.register_forward_pre_hook(self.forward_begins, prepend=True) for module in pipeline.stages]
        try:
            yield
        finally:
            end()
            for hook in hooks:
                hook.remove()

    def forward_begins(self, *_: object) -> None:
        """A stage is called; without gradients for the shapes that it gives, and by checkpointing inside a backward pass."""
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
            end_backward(self._phases, by_hand=False)
            self._marks.runs(None)


class _Interrupted:
    """An optimizer phase with other phases inside: it is over before they begin, and begins anew after them."""

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


def _step_by_hand(step: TrainingStep, copies: Copies, lightning: LightningLoop) -> None:
    """A LightningModule that calls `manual_backward` and its optimizers itself; its phases are marked by what `MemoryCallback` is told."""
    marks, module = copies.marks, copies.model
    phases = PhaseWindows(marks.boundary)

    def manual_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        scaled = copies.scaler.scale(loss) if copies.scaler else loss
        begin_backward(phases)
        before = marks.runs(Phase.BACKWARD)
        scaled.backward(*args, **kwargs)
        marks.runs(before)
        end_backward(phases, by_hand=True)

    def update(optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Lightning's `Precision.optimizer_step`, and that of `MixedPrecision` with a scaler."""

        def then_begin() -> Any:
            result = closure()
            begin_update(phases, by_hand=True)
            return result

        if copies.scaler is None:
            return optimizer.step(closure=then_begin, **kwargs)
        closure()
        marks.runs(Phase.OPTIMIZER_STEP)
        copies.scaler.unscale_(optimizer)
        begin_update(phases, by_hand=True)
        result = copies.scaler.step(optimizer, **kwargs)
        copies.scaler.update()
        marks.runs(Phase.FORWARD)
        return result

    with marks.step():
        batch = copies.new_batch()
        phases.open_phase(Phase.FORWARD)
        marks.runs(Phase.FORWARD)
        with _updates_marked(copies, phases), lightning.manual(module, copies.optimizers, manual_backward, update), _autocast(step, copies):
            lightning.training_step(module, batch)
        end_by_hand(phases)
        phases.end_step()
        marks.runs(None)
        marks.add_windows(phases.windows)
        del batch


@contextmanager
def _updates_marked(copies: Copies, phases: PhaseWindows) -> Iterator[None]:
    """Mark where updates of the optimizers begin and end, whoever makes them."""
    marks = copies.marks

    def begins(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        begin_update(phases, by_hand=True)
        marks.runs(Phase.OPTIMIZER_STEP)
        return tuple(map(with_phase, args)), {name: with_phase(value) for name, value in kwargs.items()}

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
        end_update(phases, by_hand=True)
        marks.runs(Phase.FORWARD)

    hooks: list[Any] = []
    for optimizer in copies.optimizers:
        hooks += [optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(ends)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _forward(step: TrainingStep, copies: Copies, batch: Any, number: int = 0) -> Any:
    """The forward pass to one of the losses."""
    with copies.marks.phase(Phase.FORWARD):
        with _autocast(step, copies):
            loss = step.losses[number](copies.model, batch)
        if wrong := wrong_with_loss(loss, copies.model, is_lightning=step.lightning is not None):
            name = "training_step" if step.lightning else "loss" if len(step.losses) == 1 else f"loss[{number}]"
            raise PredictionError(f"{name} {wrong}")
        return loss / step.accumulate if step.accumulate > 1 and not step.has_accumulation else loss


def _backward(step: TrainingStep, copies: Copies, loss: torch.Tensor) -> None:
    with copies.marks.phase(Phase.BACKWARD):
        if step.accumulate > 1 and step.has_accumulation:
            loss = loss / step.accumulate
        (copies.scaler.scale(loss) if copies.scaler else loss).backward()


def _update(step: TrainingStep, copies: Copies, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    with copies.marks.phase(Phase.OPTIMIZER_STEP):
        _update_all(step, copies, optimizers)


def _update_all(step: TrainingStep, copies: Copies, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    scaler = copies.scaler
    for optimizer in optimizers:
        if scaler and (step.clip_grad_norm is not None or step.clip_grad_value is not None or step.lightning is not None):
            scaler.unscale_(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if step.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, step.clip_grad_norm)
        if step.clip_grad_value is not None:
            nn.utils.clip_grad_value_(parameters, step.clip_grad_value)
        if scaler:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler:
        scaler.update()
    copies.marks.label_states(optimizers)


def _zero_grad(copies: Copies) -> None:
    for optimizer in copies.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if not copies.optimizers:
        copies.model.zero_grad(set_to_none=True)


def _autocast(step: TrainingStep, copies: Copies) -> AbstractContextManager[Any]:
    if step.autocast_dtype is None:
        return nullcontext()
    is_cached = step.lightning is None or step.lightning.autocast_cache_enabled(copies.model)
    return torch.autocast(copies.device_type, dtype=step.autocast_dtype, cache_enabled=is_cached)
