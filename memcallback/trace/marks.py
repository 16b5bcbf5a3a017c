"""Tell the ledger about steps, phases, modules and whose storages are whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from memcallback.core.allocation_trace import Event, PhaseEnd, PhaseStart
from memcallback.core.code_lines import frames_of
from memcallback.core.errors import PredictionError
from memcallback.core.module_table import ModuleInfo
from memcallback.core.phase_spans import PhaseSpan, phase_of
from memcallback.core.tensors import dense_parts, tensors_in
from memcallback.core.types import Category, Phase
from memcallback.step.copies.optimizers import OptimizerParts, moved_to
from memcallback.step.holdings import states_of
from memcallback.step.lightning_loop import LightningLoop
from memcallback.step.module_follower import ModuleFollower, module_infos
from memcallback.step.pipeline import Pipeline, PipelineError
from memcallback.step.ranks import Ranks
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.dispatch.placeholders import NoStandIn

_ON_FAKES = (
    "A step is traced on fake tensors, which have shapes and no values. What reads values, calls other libraries with them or changes data in "
    "place of PyTorch fails there: take it out of the step, or out of the one that is predicted."
)
#: Of an error's own text so much is shown; all of it is in the error that caused ours.
_NUM_CHARACTERS = 160


def in_order_of_moving(module: nn.Module, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers with their module's name as `nn.Module._apply` comes to them: children
    first, then a module's own.
    """
    for child_name, child in module.named_children():
        yield from in_order_of_moving(child, f"{name}.{child_name}" if name else child_name)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        yield name, tensor


class TraceMarks:
    """Says when steps and phases begin and end, and which module runs."""

    def __init__(self, mode: TraceMode, model: nn.Module) -> None:
        self._mode = mode
        self._ledger = mode.ledger
        self._last_phase: Phase | None = None
        self._places: list[list[Event]] = []
        # What ran before the step is not what fails in it.
        mode.operator = ""
        self._follow(model)

    def _follow(self, model: nn.Module) -> None:
        """Take a model as the one that is trained."""
        self._model = model
        self._owners = {
            id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()
        }
        self._follower = ModuleFollower([model], self._mark, self._fail)
        self._mode.modules = self._follower.module_at

    def failure(self, error: Exception, hint: str) -> PredictionError:
        """What failed, where and at which operator, and the way out unless the error has one; what
        may be behind it is in the notes.
        """
        where = [
            f"in the {self._last_phase.label}" if self._last_phase else "before the first phase"
        ]
        if module := self._failed_module(error):
            where.append(f"in module {module!r}")
        if self._mode.operator and not self._mode.operator.startswith("profiler::"):
            where.append(f"after or at operator {self._mode.operator}")
        first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        has_way_out = isinstance(error, (NoStandIn, PipelineError))
        what = first_line if has_way_out else f"{type(error).__name__}: {_shortened(first_line)}"
        failure = PredictionError(
            f"The step could not be traced, {', '.join(where)}: {what}.{'' if has_way_out else f' {hint}'}"
        )
        failure.__notes__ = [_ON_FAKES]
        return failure

    def _failed_module(self, error: Exception) -> str | None:
        """The innermost module whose call an error went through."""
        names = {id(module): name for name, module in self._model.named_modules()}
        code, failed = nn.Module._call_impl.__code__, None
        for frame, _ in frames_of(error.__traceback__):
            if frame.f_code is code:
                failed = names.get(id(frame.f_locals["self"]), failed)
        return failed

    def module_infos(self) -> tuple[ModuleInfo, ...]:
        """The model's modules."""
        with torch._C.DisableTorchFunction():
            return module_infos([self._model])

    def add_model(self) -> None:
        """Write down the model's way to the device."""
        with torch._C.DisableTorchFunction(), self._mode.unrecorded():
            for name, tensor in in_order_of_moving(self._model):
                category = (
                    Category.PARAMETER if isinstance(tensor, nn.Parameter) else Category.BUFFER
                )
                for part in dense_parts(tensor):
                    if self._ledger.find(part) is None:
                        self._ledger.add(part, category, "Module.to").module = name

    def parallelize(
        self,
        ranks: Ranks,
        lightning: LightningLoop | None,
        parts: Sequence[OptimizerParts],
        places: Sequence[str],
    ) -> tuple[nn.Module, list[OptimizerParts]]:
        """Spread the model over ranks, as the training does before its first step, and write down
        what it takes from here on.
        """
        self._add_as_they_are(places)
        self._mode.is_recording = True
        before = dict(self._model.named_parameters())
        whole = ranks.parallelize(self._model, "cuda" if self._mode.spec else "cpu")
        if isinstance(whole, Pipeline):
            if lightning is not None:
                raise PipelineError(
                    "A LightningModule is not run in a pipeline, for which Lightning has no strategy. Give the step of the module in it: "
                    "TrainingStep(model, batch, loss=...)."
                )
            self._model = whole.named
        self._follow(self._model)
        parameters = dict(self._model.named_parameters())
        with torch._C.DisableTorchFunction():
            for tensors, category in (
                (parameters, Category.PARAMETER),
                (dict(self._model.named_buffers()), Category.BUFFER),
            ):
                self._ledger.label(
                    ((name.rpartition(".")[0], tensor) for name, tensor in tensors.items()),
                    category,
                )
        # A stage may have other names for the same parameters; what has taken their place elsewhere
        # has the same names.
        own = {id(parameter) for parameter in before.values()}
        successors = {
            id(parameter if id(parameter) in own else before.get(name)): parameter
            for name, parameter in parameters.items()
        }
        if successors.keys() != own or any(
            number != id(parameter) for number, parameter in successors.items()
        ):
            parts = [moved_to(part, successors) for part in parts]
        if lightning is None:
            return whole, [*parts]
        lightning.call_through(self._model, whole)
        return self._model, [*parts]

    def _add_as_they_are(self, places: Sequence[str]) -> None:
        """Parameters and buffers are where the user's are: on the host, or on the device, which is
        written down.
        """
        with torch._C.DisableTorchFunction():
            for (name, tensor), place in zip(in_order_of_moving(self._model), places, strict=True):
                for part in dense_parts(tensor):
                    if self._ledger.find(part) is None:
                        category = (
                            Category.PARAMETER
                            if isinstance(tensor, nn.Parameter)
                            else Category.BUFFER
                        )
                        is_host = self._mode.spec is not None and place in ("cpu", "meta")
                        entry = self._ledger.add(part, category, "Module.to", is_host=is_host)
                        entry.module, entry.is_meta = name, is_host and place == "meta"

    def add_states(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Write down the state that optimizers came with; a count of steps is on the host unless a
        kernel reads it.
        """
        with torch._C.DisableTorchFunction():
            for optimizer in optimizers:
                on_device = any(
                    group.get("fused") or group.get("capturable")
                    for group in optimizer.param_groups
                )
                for owner, state in optimizer.state.items():
                    for tensor in chain.from_iterable(map(dense_parts, tensors_in(state))):
                        is_host = tensor.dim() == 0 and not on_device
                        entry = self._ledger.add(
                            tensor, Category.OPTIMIZER_STATE, "Optimizer", is_host=is_host
                        )
                        entry.module = self._owners.get(id(owner), "")

    def add_batch(self, batch: Any) -> None:
        """Write down a batch that came to the device."""
        with torch._C.DisableTorchFunction():
            for tensor in chain.from_iterable(map(dense_parts, tensors_in(batch))):
                if self._ledger.find(tensor) is None:
                    self._ledger.add(tensor, Category.INPUT, "Tensor.to")

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step."""
        self._mode.in_flight.begin_step()
        self._ledger.start_step()
        yield
        self._ledger.end_step()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """One phase."""
        self._enter_phase(phase)
        self._follower.begin_phase()
        self._ledger.start_phase(phase)
        try:
            yield
        finally:
            self._label_gradients()
            self._ledger.end_phase()

    def _label_gradients(self) -> None:
        self._ledger.module = ""
        with torch._C.DisableTorchFunction():
            gradients = (
                (name, parameter.grad) for name, parameter in self._model.named_parameters()
            )
            owned = (
                (name.rpartition(".")[0], gradient)
                for name, gradient in gradients
                if gradient is not None
            )
            self._ledger.label(owned, Category.GRADIENT)

    def runs(self, phase: Phase | None) -> Phase | None:
        """What follows belongs to a phase whose window is told later."""
        before, self._ledger.phase = self._ledger.phase, phase
        if phase is not None:
            self._enter_phase(phase)
        return before

    def _enter_phase(self, phase: Phase) -> None:
        """What failed or ran before is not what fails in this phase."""
        self._last_phase, self._mode.operator = phase, ""

    def boundary(self) -> None:
        """A boundary between phases that are told later is here."""
        self._label_gradients()
        self._ledger.label_activations()
        self._follower.begin_phase()
        self._places.append(self._ledger.place())

    def add_windows(self, windows: Sequence[PhaseSpan]) -> None:
        """Which boundaries are those of which phases."""
        for covers, start, end in windows:
            phase = phase_of(covers)
            self._places[start].append(PhaseStart(phase, covers if len(covers) > 1 else ()))
            self._places[end].append(PhaseEnd(phase))
        self._places = []

    def label_states(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Say which tensors are the optimizers' state."""
        with torch._C.DisableTorchFunction():
            for optimizer in optimizers:
                for owner, state in states_of(optimizer):
                    name = self._owners.get(id(owner), "")
                    self._ledger.label(
                        ((name, tensor) for tensor in tensors_in(state)), Category.OPTIMIZER_STATE
                    )

    @contextmanager
    def modules_named(self) -> Iterator[None]:
        """Follow which module runs."""
        self._follower.begin()
        try:
            yield
        finally:
            self._follower.end()

    def _mark(self, path: tuple[str, ...], is_backward: bool) -> None:
        self._ledger.module = path[-1] if path else ""
        if self._mode.is_recording:
            self._ledger.mark(path, is_backward=is_backward)

    def _fail(self, error: Exception) -> None:
        raise error


def _shortened(text: str) -> str:
    return text if len(text) <= _NUM_CHARACTERS else f"{text[:_NUM_CHARACTERS].rstrip()} ..."
