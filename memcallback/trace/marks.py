"""Tells the ledger about steps, phases and modules, and what each tensor is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from memcallback.core.allocation_trace import PhaseEnd, PhaseStart
from memcallback.core.code_lines import frames_of, own_line_of_error
from memcallback.core.errors import PredictionError
from memcallback.core.module_table import ModuleInfo
from memcallback.core.phase_spans import PhaseSpan, phase_of
from memcallback.core.tensors import dense_parts, tensors_in
from memcallback.core.torch_private import DisableTorchFunction, module_call
from memcallback.core.types import Category, Phase, Stage
from memcallback.step.holdings import states_of
from memcallback.step.module_follower import ModuleFollower, module_infos
from memcallback.step.pipeline import PipelineError
from memcallback.trace.dispatch.blocks import Position, Row
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.dispatch.placeholders import NoPlaceholder

_ON_FAKES = (
    "A step is traced on fake tensors, which have shapes and no values. Code that reads values, "
    "passes them to other libraries or changes data without PyTorch can fail there: take it out "
    "of the step, or predict a step without it."
)
#: The most characters of an error's text that are quoted; the error itself is the cause of ours.
_MAX_CHARACTERS = 160


def in_order_of_moving(module: nn.Module, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers with their module's name in the order of `nn.Module._apply`."""
    for child_name, child in module.named_children():
        yield from in_order_of_moving(child, f"{name}.{child_name}" if name else child_name)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        yield name, tensor


def _hung_on(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in the attributes of a parameter of a library's own kind (scales of blocks)."""
    _, names = getattr(tensor, "own_kind", (None, ()))
    return list(tensors_in([getattr(tensor, name) for name in names]))


class Place(NamedTuple):
    """A place in a trace, with what was counted up to there."""

    position: Position
    num_flops: int
    sent_bytes: int
    num_bounds: int


class Repeated:
    """A part of a trace that repeats.

    Attributes:
        num_all: How often it repeats.
        period: After how many repetitions the same kernels run again.
        cuts: The numbers of the places where a traced repetition begins, and of the end.
    """

    def __init__(self, num_all: int, period: int, ledger: Ledger) -> None:
        self.num_all, self.period, self._ledger = num_all, period, ledger
        self.cuts: list[int] = []

    def cut(self) -> None:
        """Mark where a repetition begins, or the last one ends."""
        self.cuts.append(self._ledger.cut())


class TraceMarks:
    """Marks a model's steps, phases and modules in the ledger of a mode."""

    def __init__(self, mode: TraceMode, model: nn.Module) -> None:
        self._mode = mode
        self._ledger = mode.ledger
        self._last_phase: Phase | None = None
        #: Samples in the batches that come now, if others than in the step's own.
        self.other_batch_size: int | None = None
        self.repeated_parts: list[Repeated] = []
        #: Where marks of the boundaries since the last windows belong.
        self._boundaries: list[list[Row]] = []
        # An operator that ran before the step is not what fails in it.
        mode.operator = ""
        self.follow(model)

    def follow(self, model: nn.Module, called: nn.Module | None = None) -> None:
        """Take the parameters and the modules of a model for those that are trained.

        `called` is the compiled wrapper that is called in its place, if there is one.
        """
        self._model = model
        self._owners = {
            id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()
        }
        self._follower = ModuleFollower(
            [model if called is None else called],
            self._change_module,
            self._fail,
            keeps_fused=False,  # here PyTorch does not see our hooks
        )
        self._mode.modules = self._follower.module_at

    def failure(self, error: BaseException, hint: str) -> PredictionError:
        """Explain an error: what failed, where, at which operator, and a hint unless it has one."""
        where = [
            f"in the {self._last_phase.label}" if self._last_phase else "before the first phase"
        ]
        if module := self._failed_module(error):
            where.append(f"in module {module!r}")
        if line := own_line_of_error(error.__traceback__):
            where.append(f"at {line}")
        if self._mode.operator and not self._mode.operator.startswith("profiler::"):
            where.append(f"after or at operator {self._mode.operator}")
        text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        if isinstance(error, (NoPlaceholder, PipelineError)):
            text = f"{text}."
        else:
            if len(text) > _MAX_CHARACTERS:
                text = f"{text[:_MAX_CHARACTERS].rstrip()} ..."
            text = f"{type(error).__name__}: {text}. {self._assumed_shape()}{hint}"
        failure = PredictionError(f"The step could not be traced, {', '.join(where)}: {text}")
        failure.__notes__ = [_ON_FAKES]
        return failure

    def _assumed_shape(self) -> str:
        """The operators that got the largest possible shape, on which other code may fail."""
        operators = dict.fromkeys(self._mode.placeholders.open_shapes)
        if not operators:
            return ""
        return (
            f"The shape of {' and '.join(operators)} depends on values, so before this error the "
            "largest possible was assumed. "
        )

    def _failed_module(self, error: BaseException) -> str | None:
        """The innermost module whose call the error went through."""
        names = {id(module): name for name, module in self._model.named_modules()}
        code, failed = module_call.__code__, None
        for frame, _ in frames_of(error.__traceback__):
            if frame.f_code is code:
                failed = names.get(id(frame.f_locals["self"]), failed)
        return failed

    def module_infos(self) -> tuple[ModuleInfo, ...]:
        """The model's modules."""
        with DisableTorchFunction():
            return module_infos([self._model])

    def add_model(self, device_types: Iterable[str]) -> None:
        """Record parameters and buffers, each on a type of device, in the order of moving.

        What a library quantizes as it moves (bitsandbytes 4-bit) is quantized at its turn.
        """
        for (name, tensor), device_type in zip(
            in_order_of_moving(self._model), device_types, strict=True
        ):
            is_host = self._mode.spec is not None and device_type in ("cpu", "meta")
            if self._mode.spec is not None and not is_host:
                self._quantize(name, tensor)
            category = Category.BUFFER
            if isinstance(tensor, nn.Parameter):
                category = Category.PARAMETER
            with DisableTorchFunction(), self._mode.unrecorded():
                for part in (*dense_parts(tensor), *_hung_on(tensor)):
                    if self._ledger.find(part) is None:
                        entry = self._ledger.add(part, category, "Module.to", is_host=is_host)
                        entry.module, entry.is_meta = name, is_host and device_type == "meta"

    def _quantize(self, name: str, tensor: torch.Tensor) -> None:
        """Quantize a parameter if its library does so as it moves to the device."""
        kind, _ = getattr(tensor, "own_kind", (None, ()))
        quantize = getattr(kind, "_quantize", None)
        if quantize is None or getattr(tensor, "bnb_quantized", True):
            return
        with DisableTorchFunction():
            self._ledger.add(tensor, Category.PARAMETER, "Module.to", is_host=True)
        self._ledger.module = name
        quantize(tensor, CUDA)
        self._ledger.module = ""
        with DisableTorchFunction():
            packed = ((name, part) for part in (tensor, *_hung_on(tensor)))
            self._ledger.label(packed, Category.PARAMETER)

    def add_beside(self, name: str, it: object, *, is_host: bool) -> None:
        """Record what is there beside the model, under a name."""
        with DisableTorchFunction(), self._mode.unrecorded():
            tensors: Iterable[tuple[str, torch.Tensor]] = (
                in_order_of_moving(it, name)
                if isinstance(it, nn.Module)
                else ((name, tensor) for tensor in tensors_in(it))
            )
            for module, tensor in tensors:
                is_weight = isinstance(tensor, nn.Parameter) or not isinstance(it, nn.Module)
                category = Category.PARAMETER if is_weight else Category.BUFFER
                for part in dense_parts(tensor):
                    if self._ledger.find(part) is None:
                        entry = self._ledger.add(part, category, "Module.to", is_host=is_host)
                        entry.module = module

    def add_when_it_runs(self, name: str, module: nn.Module, *, is_host: bool) -> None:
        """Record a module beside the model if a part of it runs: a program may not use it.

        It is on the device from here on, as programs move all models before they train. Of a
        container, which does not run itself, only the modules that do.
        """
        if isinstance(module, (nn.ModuleDict, nn.ModuleList)):
            for child_name, child in module.named_children():
                self.add_when_it_runs(f"{name}.{child_name}", child, is_host=is_host)
            return
        hooks: list[Any] = []
        place = self._ledger.place()

        def add(*_: object) -> None:
            while hooks:
                hooks.pop().remove()
            with self._ledger.recording_at(place):
                self.add_beside(name, module, is_host=is_host)

        hooks += [part.register_forward_pre_hook(add) for part in module.modules()]

    def add_states(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Record optimizer state; a step count is on the host unless a kernel reads it."""
        with DisableTorchFunction():
            for optimizer in optimizers:
                on_device = any(
                    group.get("fused") or group.get("capturable")
                    for group in optimizer.param_groups
                )
                for owner, state in states_of(optimizer):
                    for tensor in chain.from_iterable(map(dense_parts, tensors_in(state))):
                        is_host = tensor.dim() == 0 and not on_device
                        entry = self._ledger.add(
                            tensor, Category.OPTIMIZER_STATE, "Optimizer", is_host=is_host
                        )
                        entry.module = self._owners.get(id(owner), "")

    def add_batch(self, batch: Any, *, on_host: Iterable[bool] = ()) -> None:
        """Record a batch, with its first tensors on the host where `on_host` says so."""
        with DisableTorchFunction():
            for tensor, is_host in zip(
                tensors_in(batch), chain(on_host, repeat(False)), strict=False
            ):
                for part in dense_parts(tensor):
                    if self._ledger.find(part) is None:
                        self._ledger.add(part, Category.INPUT, "Tensor.to", is_host=is_host)

    def label_batch(self, batch: Any) -> None:
        """Label the storages of a batch that hooks have made or changed."""
        self._label((("", tensor) for tensor in tensors_in(batch)), Category.INPUT)

    def label_model(self) -> None:
        """Label the storages of parameters and buffers that PyTorch has created."""
        self._label(self._model.named_parameters(), Category.PARAMETER)
        self._label(self._model.named_buffers(), Category.BUFFER)

    def label_states(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Label the storages of optimizer state."""
        with DisableTorchFunction():
            for optimizer in optimizers:
                for owner, state in states_of(optimizer):
                    name = self._owners.get(id(owner), "")
                    states = ((name, tensor) for tensor in tensors_in(state))
                    self._ledger.label(states, Category.OPTIMIZER_STATE)

    def _label_gradients(self) -> None:
        self._ledger.module = ""
        parameters = self._model.named_parameters()
        self._label(((name, parameter.grad) for name, parameter in parameters), Category.GRADIENT)

    def _label(
        self, tensors: Iterable[tuple[str, torch.Tensor | None]], category: Category
    ) -> None:
        """Label the storages of tensors, each with the module that its name begins with."""
        with DisableTorchFunction():
            owned = (
                (name.rpartition(".")[0], tensor) for name, tensor in tensors if tensor is not None
            )
            self._ledger.label(owned, category)

    @contextmanager
    def step(self, stage: Stage = Stage.TRAINING) -> Iterator[None]:
        """Mark a step."""
        self._mode.in_flight.begin_step()
        self._ledger.start_step(stage, self.other_batch_size)
        yield
        self._ledger.end_step()

    def repeated(self, num_all: int, period: int) -> Repeated:
        """Mark a part that repeats so often, of which some repetitions are traced."""
        part = Repeated(num_all, period, self._ledger)
        self.repeated_parts.append(part)
        return part

    @property
    def num_reads(self) -> int:
        """How often the program has read values that are known."""
        return self._mode.values.num_reads

    def here(self) -> Place:
        """What was recorded so far."""
        mode = self._mode
        return Place(
            self._ledger.here(), mode.num_flops, mode.sent_bytes, mode.placeholders.bounds.num_asked
        )

    def repeat(self, earlier: Place, last: Place, times: int) -> bool:
        """Repeat what was recorded since `last` if it is as what is before; whether it is."""
        if not self._ledger.repeat(earlier.position, last.position, times):
            return False
        mode = self._mode
        mode.num_flops += times * (mode.num_flops - last.num_flops)
        mode.sent_bytes += times * (mode.sent_bytes - last.sent_bytes)
        mode.placeholders.bounds.repeat(last.num_bounds, times)
        return True

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Mark a phase."""
        self._enter_phase(phase)
        self._follower.begin_phase()
        self._ledger.start_phase(phase)
        try:
            yield
        finally:
            self._label_gradients()
            self._ledger.end_phase()

    def set_phase(self, phase: Phase | None) -> Phase | None:
        """Set the phase of new allocations, for windows that come later; returns the one before."""
        before, self._ledger.phase = self._ledger.phase, phase
        if phase is not None:
            self._enter_phase(phase)
        return before

    def _enter_phase(self, phase: Phase) -> None:
        # An operator that ran in another phase is not what fails in this one.
        self._last_phase, self._mode.operator = phase, ""

    def boundary(self) -> None:
        """Mark a boundary between phases; `add_windows` says between which."""
        self._label_gradients()
        self._ledger.label_activations()
        self._follower.begin_phase()
        self._boundaries.append(self._ledger.place())

    def add_windows(self, windows: Sequence[PhaseSpan]) -> None:
        """Mark the phases between the boundaries since the last windows."""
        for covers, start, end in windows:
            phase = phase_of(covers)
            self._boundaries[start].append(PhaseStart(phase, covers if len(covers) > 1 else ()))
            self._boundaries[end].append(PhaseEnd(phase))
        self._boundaries = []

    @contextmanager
    def modules_followed(self) -> Iterator[None]:
        """Mark which module runs."""
        self._follower.begin()
        try:
            yield
        finally:
            self._follower.end()

    def _change_module(self, path: tuple[str, ...], is_backward: bool) -> None:
        self._ledger.module = path[-1] if path else ""
        if self._mode.is_recording:
            self._ledger.mark(path, is_backward=is_backward)

    def _fail(self, error: Exception) -> None:
        raise error
