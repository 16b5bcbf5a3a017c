"""From a `TrainingStep` to the list of what its training asks of a CUDA device's allocator, without a device."""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from memcallback.cuda_composites import registered
from memcallback.cuda_rnn import flatten_rnn_weights
from memcallback.cuda_semantics import cuda_semantics
from memcallback.devices import DeviceSpec
from memcallback.events import Category, Event, Phase, PhaseEnd, PhaseStart
from memcallback.fake_answers import fakes_as_real
from memcallback.fakes import fake_copy, untouched_globals
from memcallback.function_copies import untouched_variables
from memcallback.holdings import states_of, tensors_in
from memcallback.ledger import Ledger
from memcallback.lightning_step import LightningLoop
from memcallback.loops import Copies, run_window
from memcallback.module_hooks import ModuleFollower, module_infos
from memcallback.module_memory import ModuleInfo
from memcallback.optimizer_copy import OptimizerParts, fill_history, moved_to, optimizer_from, optimizer_parts, run_to_the_end
from memcallback.phase_windows import PhaseWindow, phase_of
from memcallback.pipelines import Pipeline, PipelineError
from memcallback.rank_messages import Messages, with_messages
from memcallback.ranks import Ranks
from memcallback.resizing import resize_batch
from memcallback.stand_ins import Bounds, NoStandIn
from memcallback.steps import PredictionError, TrainingStep
from memcallback.tensor_parts import dense_parts
from memcallback.trace_mode import CUDA, TraceMode
from memcallback.traced_step import TracedStep

_FULL_HISTORY = "LBFGS runs all its iterations, and from the second update on its history is full"
_ON_FAKES = (
    "A step is traced on fake tensors, which have shapes and no values. What reads values, calls other libraries with them or changes data in "
    "place of PyTorch fails there: take it out of the step, or out of the one that is predicted."
)
#: Its distributed engines are asked for much that is not public; with this and 2.13 that was tried.
_OLDEST_WITH_RANKS = (2, 11)
#: Of an error's own text so much is shown; all of it is in the error that caused ours.
_NUM_CHARACTERS = 160
#: What stands in for functions of torch is put there and taken away again in order.
_ONE_AT_A_TIME = threading.RLock()


def trace(
    step: TrainingStep,
    device: DeviceSpec | None,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    num_windows: int | None = None,
    bounds: Bounds | None = None,
) -> TracedStep:
    """Trace the model's way to the device and the first updates of a training on it.

    Runs on a copy of fake tensors: nothing of the user's is changed, and nothing is computed.

    Args:
        step: The step.
        device: The card; None for a CPU.
        batch_size: Samples in the batch; None for as many as it has.
        sequence_length: How long its sequences are; None for as long as they are. Others need a step that says how long that is.
        num_windows: How many optimizer updates; gradient accumulation has several steps for each. By default two: the first, which makes
            gradients and optimizer state, and a steady one; three where ranks take longer to settle.
        bounds: Shared by the traces of a step, so that their sizes are on lines.

    Returns:
        The trace.

    Raises:
        PredictionError: If the step fails on fake tensors; the text names the phase, the operator, the module and the way out.
    """
    own_bounds = bounds or Bounds()
    ranks = step.ranks

    def trace_as(rank: Ranks | None, messages: Messages | None, bounds: Bounds) -> TracedStep:
        bounds.restart()
        return _trace_as(rank, messages, step, device, bounds, batch_size, sequence_length, num_windows)

    if ranks is None:
        return trace_as(None, None, own_bounds)
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_WITH_RANKS:
        raise PredictionError(
            f"A rank of a job is predicted with PyTorch {'.'.join(map(str, _OLDEST_WITH_RANKS))} or later, and this is {torch.__version__}. Install a "
            "later one, or leave ranks out for one device."
        )
    return with_messages(
        lambda rank, messages: trace_as(ranks.as_rank(rank), messages, own_bounds if rank == ranks.rank else Bounds()), ranks.rank
    )


def _trace_as(
    ranks: Ranks | None,
    messages: Messages | None,
    step: TrainingStep,
    device: DeviceSpec | None,
    bounds: Bounds,
    batch_size: int | None,
    sequence_length: int | None,
    num_windows: int | None,
) -> TracedStep:
    """As `trace`, where the step is one of a rank, which has messages from others."""
    given = step.batch_size.batch_size
    lengths = (step.sequence_length, sequence_length) if step.sequence_length and sequence_length else None
    num_windows = num_windows or (ranks.num_updates_to_settle if ranks else 1) + 1
    num_parts = 1
    mode = TraceMode(Ledger(), device, bounds)
    with _ONE_AT_A_TIME, untouched_globals(), untouched_variables(step.model, step.losses), fakes_as_real(mode.assumed):
        mode.calibrate()
        parts = [optimizer_parts(optimizer) for optimizer in step.given_optimizers]
        model, batch, parts = fake_copy((step.model, step.batch, parts), mode)
        places = [tensor.device.type for _, tensor in _in_order_of_moving(step.model)]
        for module in model.modules() if device else ():
            for name, value in vars(module).items():
                if isinstance(value, torch.device):
                    vars(module)[name] = CUDA

        def new_batch() -> Any:
            with mode.unrecorded():
                fresh = resize_batch(batch, given or 0, num_parts * (batch_size or given or 0), lengths=lengths)
            tracer.add_batch(fresh)
            return fresh

        tracer = _Tracer(mode, model)
        with ExitStack() as stack:
            stack.enter_context(cuda_semantics(mode, device) if device else _cpu_semantics(mode))
            stack.enter_context(torch.enable_grad())
            if ranks is not None and messages is not None:
                # Importing it takes PyTorch's distributed tensors.
                from memcallback.rank_answers import rank_answers

                stack.enter_context(ranks.world())
                stack.enter_context(rank_answers(mode, messages))
            try:
                if step.prepare is not None:
                    batch = step.prepare(model, batch)
                if device:
                    flatten_rnn_weights(model)
                if ranks is None:
                    tracer.add_model()
                    mode.is_recording = True
                else:
                    model, parts = tracer.parallelize(ranks, step.lightning, parts, places)
                    num_parts = model.num_microbatches if isinstance(model, Pipeline) else 1
                optimizers = tuple(map(optimizer_from, parts)) if parts else step.optimizers_of(model)
                if step.change_optimizers is not None:
                    optimizers = tuple(step.change_optimizers(optimizers))
                if parts:
                    tracer.add_states(optimizers)
                run_to_the_end(optimizers)
                device_type = "cuda" if device else "cpu"
                infos = tracer.module_infos()
                copies = Copies(model=model, optimizers=optimizers, new_batch=new_batch, marks=tracer, device_type=device_type)
                num_flops, sent = [0], [0]
                with tracer.modules_named():
                    for window in range(num_windows):
                        run_window(step, copies)
                        num_flops.append(mode.num_flops)
                        sent.append(mode.sent_bytes)
                        if window == 0 and fill_history(optimizers):
                            tracer.label_states(optimizers)
                            mode.assumed[_FULL_HISTORY] = None
            except PredictionError:
                raise
            except Exception as error:  # user code on fakes can fail in any way
                raise tracer.failure(error) from error
            finally:
                mode.is_recording = False
                mode.ledger.close()
                mode.in_flight.close()
                # A gradient is a part of its tensor that Python's garbage collector does not see: left there, it would keep all this alive.
                for parameter in model.parameters():
                    parameter.grad = None
                mode.modules = None
    assert batch_size or given
    return TracedStep(
        trace=mode.ledger.trace(),
        batch_size=batch_size or given or 0,
        calls=mode.ledger.calls,
        caveats=tuple(mode.assumed),
        num_flops=num_flops[-1] - num_flops[-2],
        sent_bytes=sent[-1] - sent[-2],
        num_batches=step.accumulate * num_parts,
        origins=mode.ledger.origins,
        modules=infos,
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _NUM_CHARACTERS else f"{text[:_NUM_CHARACTERS].rstrip()} ..."


@contextmanager
def _cpu_semantics(mode: TraceMode) -> Iterator[None]:
    with registered(None), mode:
        yield


def _in_order_of_moving(module: nn.Module, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers with their module's name as `nn.Module._apply` comes to them: children first, then a module's own."""
    for child_name, child in module.named_children():
        yield from _in_order_of_moving(child, f"{name}.{child_name}" if name else child_name)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        yield name, tensor


class _Tracer:
    """Says when steps and phases begin and end, and which module runs."""

    def __init__(self, mode: TraceMode, model: nn.Module) -> None:
        self._mode = mode
        self._ledger = mode.ledger
        self._model = model
        self._owners = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        self._stack: list[str] = [""]
        self._last_phase: Phase | None = None
        self._failed_in: str | None = None
        self._places: list[list[Event]] = []
        # By its id: a tracer shall not keep an error alive, and with it what its frames hold.
        self._error_before = id(sys.exc_info()[1])
        # Where in the sequence of autograd nodes the running module changed, and to which.
        self._changed_at: list[int] = [0]
        self._changed_to: list[str] = [""]
        mode.modules, mode.operator = self._module_of, ""
        self._follower = ModuleFollower([model], self._mark, self._fail)

    def failure(self, error: Exception) -> PredictionError:
        """What failed, where and at which operator, and the way out; what may be behind it is in the notes."""
        where = [f"in the {self._last_phase.label}" if self._last_phase else "before the first phase"]
        if self._failed_in:
            where.append(f"in module {self._failed_in!r}")
        if self._mode.operator and not self._mode.operator.startswith("profiler::"):
            where.append(f"after or at operator {self._mode.operator}")
        first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        has_way_out = isinstance(error, (NoStandIn, PipelineError))
        what = first_line if has_way_out else f"{type(error).__name__}: {_shortened(first_line)}"
        way_out = "" if has_way_out else " Give a step without it: memcallback.TrainingStep(model, batch, loss=...)."
        failure = PredictionError(f"The step could not be traced, {', '.join(where)}: {what}.{way_out}")
        failure.__notes__ = [_ON_FAKES]
        return failure

    def module_infos(self) -> tuple[ModuleInfo, ...]:
        """The model's modules."""
        with torch._C.DisableTorchFunction():
            return module_infos([self._model])

    def add_model(self) -> None:
        """Write down the model's way to the device."""
        with torch._C.DisableTorchFunction():
            for name, tensor in _in_order_of_moving(self._model):
                category = Category.PARAMETER if isinstance(tensor, nn.Parameter) else Category.BUFFER
                for part in dense_parts(tensor):
                    if self._ledger.find(part) is None:
                        self._ledger.add(part, category, "Module.to").module = name

    def parallelize(
        self, ranks: Ranks, lightning: LightningLoop | None, parts: Sequence[OptimizerParts], places: Sequence[str]
    ) -> tuple[nn.Module, list[OptimizerParts]]:
        """Spread the model over ranks, as the training does before its first step, and write down what it takes from here on.

        Args:
            ranks: The job.
            lightning: How a LightningModule is run, which calls what took its place itself; None for a plain loop.
            parts: Those of the optimizers.
            places: The types of the devices on which the user's parameters and buffers are, in the order in which they would be moved.

        Returns:
            What is called in place of the model, and the optimizers' parts, with what took the place of their parameters.
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
            self._follower = ModuleFollower([self._model], self._mark, self._fail)
        parameters = dict(self._model.named_parameters())
        self._owners = {id(parameter): name.rpartition(".")[0] for name, parameter in parameters.items()}
        with torch._C.DisableTorchFunction():
            for tensors, category in ((parameters, Category.PARAMETER), (dict(self._model.named_buffers()), Category.BUFFER)):
                self._ledger.label(((name.rpartition(".")[0], tensor) for name, tensor in tensors.items()), category)
        # A stage may have other names for the same parameters; what has taken their place elsewhere has the same names.
        own = {id(parameter) for parameter in before.values()}
        successors = {id(parameter if id(parameter) in own else before.get(name)): parameter for name, parameter in parameters.items()}
        if successors.keys() != own or any(number != id(parameter) for number, parameter in successors.items()):
            parts = [moved_to(part, successors) for part in parts]
        if lightning is None:
            return whole, [*parts]
        lightning.call_through(self._model, whole)
        return self._model, [*parts]

    def _add_as_they_are(self, places: Sequence[str]) -> None:
        """Parameters and buffers are where the user's are: on the host, or on the device, which is written down."""
        with torch._C.DisableTorchFunction():
            for (name, tensor), place in zip(_in_order_of_moving(self._model), places, strict=True):
                for part in dense_parts(tensor):
                    if self._ledger.find(part) is None:
                        category = Category.PARAMETER if isinstance(tensor, nn.Parameter) else Category.BUFFER
                        is_host = self._mode.spec is not None and place in ("cpu", "meta")
                        entry = self._ledger.add(part, category, "Module.to", is_host=is_host)
                        entry.module, entry.is_meta = name, is_host and place == "meta"

    def add_states(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Write down the state that optimizers came with; a count of steps is on the host unless a kernel reads it."""
        with torch._C.DisableTorchFunction():
            for optimizer in optimizers:
                on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
                for owner, state in optimizer.state.items():
                    for tensor in chain.from_iterable(map(dense_parts, tensors_in(state))):
                        is_host = tensor.dim() == 0 and not on_device
                        entry = self._ledger.add(tensor, Category.OPTIMIZER_STATE, "Optimizer", is_host=is_host)
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
            gradients = ((name, parameter.grad) for name, parameter in self._model.named_parameters())
            owned = ((name.rpartition(".")[0], gradient) for name, gradient in gradients if gradient is not None)
            self._ledger.label(owned, Category.GRADIENT)

    def runs(self, phase: Phase | None) -> Phase | None:
        """What follows belongs to a phase whose window is told later."""
        before, self._ledger.phase = self._ledger.phase, phase
        if phase is not None:
            self._enter_phase(phase)
        return before

    def _enter_phase(self, phase: Phase) -> None:
        """What failed or ran before is not what fails in this phase."""
        self._last_phase, self._failed_in, self._mode.operator = phase, None, ""

    def boundary(self) -> None:
        """A boundary between phases that are told later is here."""
        self._label_gradients()
        self._ledger.label_activations()
        self._follower.begin_phase()
        self._places.append(self._ledger.place())

    def add_windows(self, windows: Sequence[PhaseWindow]) -> None:
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
                    self._ledger.label(((name, tensor) for tensor in tensors_in(state)), Category.OPTIMIZER_STATE)

    @contextmanager
    def modules_named(self) -> Iterator[None]:
        """Follow which module runs."""
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        self._follower.begin()
        try:
            yield
        finally:
            self._follower.end()
            for handle in handles:
                handle.remove()

    def _mark(self, path: tuple[str, ...], is_backward: bool) -> None:
        if self._mode.is_recording:
            self._ledger.mark(path, is_backward=is_backward)

    def _fail(self, error: Exception) -> None:
        raise error

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._failed_in = None
        self._change()

    def _leave(self) -> None:
        left = self._stack.pop()
        if id(sys.exc_info()[1]) != self._error_before:  # the module failed
            self._failed_in = self._failed_in or left
        self._change()

    def _change(self) -> None:
        self._ledger.module = self._stack[-1]
        number = torch._C._autograd._get_sequence_nr()
        if number == self._changed_at[-1]:
            self._changed_to[-1] = self._stack[-1]
        else:
            self._changed_at.append(number)
            self._changed_to.append(self._stack[-1])

    def _module_of(self, number: int) -> str:
        """The module in whose forward pass an autograd node was made."""
        if len(self._stack) > 1:  # a forward pass inside the backward pass: checkpointing
            return self._stack[-1]
        return self._changed_to[bisect.bisect_right(self._changed_at, number) - 1]
