"""trace(request): run a step on fake tensors, and return a TracedStep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.module_table import ModuleInfo
from memcallback.core.tensors import tensors_in
from memcallback.core.types import Stage
from memcallback.cuda.decompositions.registry import registered
from memcallback.cuda.decompositions.rnn import flatten_rnn_weights
from memcallback.devices.catalogue import DeviceSpec
from memcallback.step.beside import plain_tensors
from memcallback.step.copies.fakes import fake_copy, untouched_globals
from memcallback.step.copies.functions import (
    contents_of,
    optimizers_in_hooks,
    untouched_variables,
)
from memcallback.step.copies.optimizers import (
    fill_history,
    moved_to,
    optimizer_from,
    optimizer_parts,
    run_to_the_end,
)
from memcallback.step.inference_step import InferenceStep
from memcallback.step.lightning_batch import parts_with_tensors, stand_in
from memcallback.step.loss import default_loss, is_passed_by_name
from memcallback.step.pipeline import Pipeline, PipelineError
from memcallback.step.ranks import Ranks, newer_torch_needed
from memcallback.step.step import Step
from memcallback.step.training_step import TrainingStep
from memcallback.trace.batch_sizes import BatchSizes
from memcallback.trace.caveats import caveats, not_compiled
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.dispatch.placeholders import Bounds
from memcallback.trace.growth import NUM_BEFORE, NUM_COMPARED
from memcallback.trace.loops.batches import Batches, BatchHookError
from memcallback.trace.loops.inference import Inference
from memcallback.trace.loops.loop import run_window
from memcallback.trace.loops.passes import Training
from memcallback.trace.marks import TraceMarks, in_order_of_moving
from memcallback.trace.patches.autocast import outside_of_autocast
from memcallback.trace.patches.backward_order import backward_has_own_thread
from memcallback.trace.patches.compiled import CompiledCode, outside_of_compiled_autograd
from memcallback.trace.patches.cuda import cuda_semantics
from memcallback.trace.patches.fused_transformers import fused_transformer_patches
from memcallback.trace.patches.inference_mode import inference_mode_patches
from memcallback.trace.patches.libraries import (
    NumbersRead,
    generation_patches,
    transformers_patches,
    value_patches,
)
from memcallback.trace.patches.paged_memory import paged_memory_patches
from memcallback.trace.patches.patching import patched
from memcallback.trace.patches.rank_messages import Messages, with_messages
from memcallback.trace.patches.triton import triton_patches
from memcallback.trace.repetitions import Irregular, grown
from memcallback.trace.traced_step import TracedStep

_FULL_HISTORY = (
    "LBFGS is assumed to run all its iterations, and to have a full history from the second update "
    "on."
)
_OTHER_FAILS = (
    "All batches are assumed to have the same size, because a batch {} cannot be traced. Perhaps "
    "it fails in the training too: {}"
)
_LEAVE_IT_OUT = "Leave that code out: memcallback.TrainingStep(model, batch, loss=...)."
_GIVE_LOSS = (
    "The step has no loss, so its model is called {}: give "
    "TrainingStep(model, batch, loss=lambda model, batch: ...), which calls it as your loop does."
)
_GIVE_FORWARD = (
    "Leave that code out, or call the model as your program does: "
    "InferenceStep(model, batch, forward=lambda model, batch: ...)."
)
_UNCHECKED = (
    "A prediction leaves out the checks that metrics of torchmetrics make of their arguments "
    "(validate_args). In training they need some memory for a moment."
)
#: After how many tokens or batches the same kernels run again; some pad to multiples of 8.
_PERIODS = (1, 8)
_NOT_REGULAR = (
    "The memory of later {0} cannot be predicted from the first ones: {1}. Give at most {2} {0}; "
    "then each one is traced."
)
#: Patches must be undone in the reverse order.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class TraceRequest:
    """What to trace.

    Attributes:
        step: The step.
        device: The card; None to train on a CPU.
        batch_size: Samples in the batch; None for the step's own.
        sequence_length: Length of the batch's sequences; None for the step's own.
        num_updates: Optimizer updates to trace; None for as many as it takes to settle, and one.
        period: After how many repetitions (tokens, batches) the same kernels run again.
        bounds: Choices that all traces of a step share, so that sizes stay linear in the batch.
        compiles: Whether compiled code is compiled for the card, in a process that nothing else
            needs: Dynamo's state changes. Else it runs as it would without compilation.
        takes_known_shapes: Whether shapes that depend on values are those of the batch's values,
            where these are known, not the largest possible.
        follows_other_batch: Whether the step's batch of another size comes in between.
        runs_batch_hooks: Whether hooks of a LightningModule bring its batches to the device.
    """

    step: Step
    device: DeviceSpec | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    num_updates: int | None = None
    period: int = 1
    bounds: Bounds = field(default_factory=Bounds)
    compiles: bool = False
    takes_known_shapes: bool = False
    follows_other_batch: bool = True
    runs_batch_hooks: bool = True


def trace(request: TraceRequest) -> TracedStep:
    """Trace how the model comes to the device and the first updates of a training on it.

    Runs on a copy of fake tensors: it changes nothing of the user's, and computes nothing.
    """
    ranks = request.step.ranks
    if ranks is not None:
        return _trace_rank(request, ranks)
    for period in _PERIODS:
        traced = _trace(replace(request, period=period))
        if isinstance(traced, TracedStep):
            return traced
    what = "tokens" if request.step.stage is Stage.GENERATION else "batches"
    most = NUM_BEFORE + NUM_COMPARED * _PERIODS[-1]
    raise PredictionError(_NOT_REGULAR.format(what, traced, most))


@dataclass(frozen=True)
class _Rank:
    """The rank of a job that is traced, and the messages that it gets from the others."""

    ranks: Ranks
    messages: Messages


def _trace_rank(request: TraceRequest, ranks: Ranks) -> TracedStep:
    """Trace a rank, and first as much of others as it takes to know what they send it."""
    if needed := newer_torch_needed():
        raise PredictionError(
            f"Predicting a rank of a job needs PyTorch {needed} or later, and this is "
            f"{torch.__version__}. Install a later one, or leave ranks out for one device."
        )

    def trace_one(rank: int, messages: Messages) -> TracedStep:
        # Shapes, which others send, are the same without compilation.
        others = replace(request, bounds=Bounds(), compiles=False)
        own = request if rank == ranks.rank else others
        traced = _trace(own, _Rank(ranks.as_rank(rank), messages))
        assert isinstance(traced, TracedStep)
        return traced

    return with_messages(trace_one, ranks.rank)


def _trace(request: TraceRequest, rank: _Rank | None = None) -> TracedStep | Irregular:
    """Trace with the largest possible shapes, else with known ones; compiled, else not."""
    result, mode, code = _attempt(request, rank)
    if isinstance(result, PredictionError) and mode.open_shapes and not request.takes_known_shapes:
        # Code that counts on the true shape fails on the largest one.
        known, _, _ = _attempt(replace(request, takes_known_shapes=True), rank)
        if not isinstance(known, PredictionError):
            return known
    if not isinstance(result, PredictionError):
        return result
    if isinstance(result, BatchHookError):
        traced = _trace(replace(request, runs_batch_hooks=False), rank)
        return _with_caveat(traced, str(result))
    if not code.has_compiled:
        raise result
    if code.other_batch:
        traced = _trace(replace(request, follows_other_batch=False), rank)
        return _with_caveat(traced, _OTHER_FAILS.format(code.other_batch, result))
    traced = _trace(replace(request, compiles=False), rank)
    if isinstance(traced, Irregular):
        return traced
    return replace(traced, caveats=not_compiled(traced.caveats, result))


def _with_caveat(traced: TracedStep | Irregular, said: str) -> TracedStep | Irregular:
    if isinstance(traced, Irregular):
        return traced
    return replace(traced, caveats=(*traced.caveats, said))


def _attempt(
    request: TraceRequest, rank: _Rank | None
) -> tuple[TracedStep | Irregular | PredictionError, TraceMode, CompiledCode]:
    """A trace or why there is none, its mode, and what was compiled in it."""
    num_chosen = request.bounds.restart()
    mode = TraceMode(Ledger(), request.device, request.bounds)
    mode.values.decide_shapes = request.takes_known_shapes
    code = CompiledCode(mode, _training_of(request.step), compiles=request.compiles)
    try:
        result = _run(replace(request, compiles=code.compiles), mode, code, rank)
    except PredictionError as error:
        request.bounds.forget(num_chosen)
        return error, mode, code
    return result, mode, code


def _run(
    request: TraceRequest, mode: TraceMode, code: CompiledCode, rank: _Rank | None
) -> TracedStep | Irregular:
    step = request.step
    if code.has_whole_update or (step.ranks is not None and step.ranks.compiles_wrapper):
        import_module("torch._dynamo")  # before it is patched
    has_own_thread = backward_has_own_thread()
    with (
        _ONE_AT_A_TIME,
        torch.inference_mode(False),  # the caller may be in it
        # Leaving inference mode turns it on.
        torch.autograd.set_multithreading_enabled(has_own_thread),
        outside_of_compiled_autograd(),
        untouched_globals(),
        untouched_variables(step.model, _functions_of(step)),
        patched(value_patches(mode)),
        patched(code.patches()),
        patched(triton_patches()),
        patched(paged_memory_patches(mode)),
    ):
        mode.calibrate()
        tracer = _Tracer(request, mode, code, rank.ranks if rank else None)
        with _semantics(step, mode, rank):
            try:
                tracer.run()
            except PredictionError:
                raise
            except ENDS as error:  # user code on fakes can fail, and end, in any way
                raise_if_meant(error)
                raise tracer.marks.failure(error, _hint(step)) from error
            finally:
                tracer.close()
    return tracer.as_traced(code)


@contextmanager
def _semantics(step: Step, mode: TraceMode, rank: _Rank | None) -> Iterator[None]:
    """Let Python code do what it would do on the device, and on the rank of a job."""
    with ExitStack() as stack:
        if mode.spec:
            stack.enter_context(cuda_semantics(mode, mode.spec))
        else:
            stack.enter_context(registered(None))
            stack.enter_context(mode)
            stack.enter_context(NumbersRead())
        stack.enter_context(patched(transformers_patches(mode)))
        if mode.spec:
            stack.enter_context(patched(fused_transformer_patches(mode)))
        if not isinstance(step, InferenceStep):  # which generates as many tokens as it says
            stack.enter_context(patched(generation_patches(mode)))
        stack.enter_context(patched(inference_mode_patches()))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(outside_of_autocast())
        if rank is not None:
            # Imported here, as it imports PyTorch's distributed tensors.
            from memcallback.trace.patches.distributed import rank_patches

            stack.enter_context(rank.ranks.world())
            stack.enter_context(patched(rank_patches(mode)))
            stack.enter_context(patched(rank.messages.patches()))
        yield


def _training_of(step: Step) -> TrainingStep | None:
    """The training that a step is, or that runs before it."""
    training = step.after if isinstance(step, InferenceStep) else step
    return training if isinstance(training, TrainingStep) else None


def _functions_of(step: Step) -> tuple[Callable[..., Any], ...]:
    """The functions that a step calls, and the training before it."""
    before = step.after.functions if isinstance(step, InferenceStep) and step.after else ()
    return (*step.functions, *before)


def _hint(step: Step) -> str:
    """What to do about user code that failed: perhaps the model is called in the wrong way."""
    if not isinstance(step, TrainingStep):
        return _GIVE_FORWARD
    if step.loss is not default_loss or isinstance(step.batch, torch.Tensor):
        return _LEAVE_IT_OUT
    by_name = is_passed_by_name(step.model, step.batch)
    return _GIVE_LOSS.format("as model(**batch)" if by_name else "with the whole batch")


class _Tracer:
    """A training on copies of fake tensors, from moving the model to the device on."""

    def __init__(
        self, request: TraceRequest, mode: TraceMode, code: CompiledCode, ranks: Ranks | None
    ) -> None:
        self._request, self._mode, self._code, self._ranks = request, mode, code, ranks
        step = request.step
        #: The training, and the forward passes that are predicted after it.
        self._training = _training_of(step)
        self._inference = step if isinstance(step, InferenceStep) else None
        training = self._training
        parts = (
            [optimizer_parts(optimizer) for optimizer in training.given_optimizers]
            if training
            else []
        )
        beside = step.beside()
        # By where they are: on the host, or on the device. Before the model is on a device, those
        # on the host may be moved with it. A buffer that is still on the host then stays there.
        is_moved = any(one.device.type not in ("cpu", "meta") for one in step.model.parameters())
        attributes = {
            is_host: plain_tensors(step.model, on_host=is_host)
            if mode.spec and (is_moved or not is_host)
            else {}
            for is_host in (True, False)
        }
        host_buffers = [
            buffer
            for buffer in step.model.buffers()
            if mode.spec and is_moved and buffer.device.type == "cpu"
        ]
        (
            self._model,
            self._examples,
            self._parts,
            self._beside,
            self._losses,
            self._forward,
            self._attributes,
            self._host_buffers,
            held_by_datamodule,
        ) = fake_copy(
            (
                step.model,
                {one.stage: one.batch for one in (training, step) if one is not None},
                parts,
                beside,
                training.functions_to_copy() if training else (),
                self._inference.functions_to_copy() if self._inference else (),
                attributes,
                host_buffers,
                parts_with_tensors(step.datamodule),
            ),
            mode,
            compiles=request.compiles,
        )
        self._datamodule = stand_in(step.datamodule, held_by_datamodule)
        self._is_beside_on_host = {name: _is_left_on_host(it, step) for name, it in beside.items()}
        for root in (self._model, *self._beside.values()) if mode.spec else ():
            for module in _modules_in(root):
                for name, value in vars(module).items():
                    if isinstance(value, torch.device):
                        vars(module)[name] = CUDA
        for module in self._model.modules():
            if type(module).__module__.startswith("torchmetrics.") and getattr(
                module, "validate_args", False
            ):
                vars(module)["validate_args"] = False
                mode.assumed[_UNCHECKED] = None
        self._in_hooks: list[torch.optim.Optimizer] = []
        self.marks = TraceMarks(mode, self._model)
        #: Parts that a pipeline cuts a batch into, each with the samples of one batch.
        self._num_parts = 1
        self._infos: tuple[ModuleInfo, ...] = ()
        self._batches: Batches | None = None
        #: Of the model's last call, if the training keeps them.
        self._outputs: Any = None
        #: Totals at the end of each update.
        self._num_flops, self._sent_bytes = [0], [0]

    def run(self) -> None:
        """Run the updates, and the forward passes after them."""
        step, mode = self._request.step, self._mode
        for one in (self._training, self._inference):
            if one is not None and one.prepare is not None:
                self._examples[one.stage] = one.prepare(self._model, self._examples[one.stage])
        if mode.spec:
            flatten_rnn_weights(self._model)
        if self._ranks is None:
            mode.is_recording = True
            on_host = set(map(id, self._host_buffers))
            self.marks.add_model(
                "cpu" if id(tensor) in on_host else "cuda"
                for _, tensor in in_order_of_moving(self._model)
            )
        else:
            self._parallelize(self._ranks)
        self._batches = Batches(
            self._examples,
            self._model,
            self._datamodule,
            marks=self.marks,
            mode=mode,
            num_parts=self._num_parts,
            runs_hooks=self._request.runs_batch_hooks,
        )
        for is_host, attributes in self._attributes.items():
            while attributes:  # and not kept: the model may replace them
                name, tensors = attributes.popitem()
                self.marks.add_beside(name, tensors, is_host=is_host)
        for name, it in self._beside.items():
            add = self.marks.add_beside if name in step.also else self.marks.add_when_it_runs
            add(name, it, is_host=self._is_beside_on_host[name])
        optimizers = self._optimizers()
        self._infos = self.marks.module_infos()
        with self.marks.modules_followed():
            if self._training is not None:
                self._train(self._training, optimizers)
            if self._inference is not None:
                self._code.end_training()
                self._infer(self._inference, optimizers)

    def _train(self, step: TrainingStep, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        mode = self._mode
        training = Training(
            step=step,
            model=self._model,
            losses=self._losses or step.losses,
            optimizers=optimizers,
            new_batches=partial(self._new_batches, step),
            marks=self.marks,
            device_type=self._device_type,
        )
        hooks = ExitStack()
        if step.keep_outputs == "last":
            hooks.callback(self._model.register_forward_hook(self._keep_outputs).remove)
        if self._ranks:
            mode.num_windows_to_settle = self._ranks.num_updates_to_settle
        number, num_to_settle = 0, mode.num_windows_to_settle
        with hooks:
            # Compiled code tells in the first update how many it takes.
            while number < (self._request.num_updates or num_to_settle + 1):
                num_to_settle = self._update(training)
                if number == 0 and fill_history(optimizers):
                    self.marks.label_states(optimizers)
                    mode.assumed[_FULL_HISTORY] = None
                number += 1
            if not self._request.num_updates and self._request.follows_other_batch:
                self._follow_other_batch(training, number)

    def _update(self, training: Training) -> int:
        """Run an update; gives the number of those after which all are alike."""
        run_window(training)
        self.marks.label_states(self._in_hooks)
        return self._count_work()

    def _follow_other_batch(self, training: Training, num_to_settle: int) -> None:
        """Run an update with a batch of another size, and some more with the step's own."""
        step, code, batches = training.step, self._code, self._batches
        assert batches is not None
        own = self._sizes(step)
        other = own.other(step)
        # A pipeline's stages agree on the sizes before the first batch.
        if other == own or not code.has_compiled_passes or isinstance(self._model, Pipeline):
            return
        code.say_other_batch(own, other)
        # A graph warms up with the first batch of a size, and is recorded with the second.
        for _ in range(2 if code.has_graphs else 1):
            batches.other, self.marks.other_batch_size = other, other.batch_size
            self._update(training)
            batches.other = self.marks.other_batch_size = None
            for _ in range(num_to_settle):
                self._update(training)

    def _keep_outputs(self, model: torch.nn.Module, batch: object, outputs: Any) -> None:
        self._outputs = outputs

    def _infer(self, step: InferenceStep, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        if step.frees_gradients and step.lightning is not None:
            step.lightning.free_gradients(self._model)
        elif step.frees_gradients:
            self._model.zero_grad(set_to_none=True)
        if step.after is not None or step.lightning is not None:
            self._model.eval()
        (forward,) = self._forward or (step.forward,)
        Inference(
            step=step,
            model=self._model,
            forward=forward,
            new_batch=lambda: self._new_batches(step, 1).pop(),
            marks=self.marks,
            device_type=self._device_type,
            period=self._request.period,
        ).run(self._count_work)

    def _count_work(self) -> int:
        """Note the totals so far; gives the number of windows after which all are alike."""
        self._mode.num_windows += 1
        self._num_flops.append(self._mode.num_flops)
        self._sent_bytes.append(self._mode.sent_bytes)
        return self._mode.num_windows_to_settle

    @property
    def _device_type(self) -> str:
        return "cuda" if self._mode.spec else "cpu"

    def close(self) -> None:
        """Stop recording, and release what keeps the trace alive."""
        mode = self._mode
        mode.is_recording = False
        self._outputs = None
        if self._batches is not None:
            self._batches.close()
        if self._training is not None and self._training.lightning is not None:
            self._training.lightning.outputs = {}
        mode.ledger.close()
        mode.in_flight.close()
        # Python's garbage collector does not see that a tensor refers to its gradient: left there,
        # it would keep all this alive.
        for parameter in self._model.parameters():
            parameter.grad = None
        mode.modules = None

    def as_traced(self, code: CompiledCode) -> TracedStep | Irregular:
        """What was recorded; why parts that are to be repeated do not repeat."""
        ledger, request = self._mode.ledger, self._request
        batch_size = request.batch_size or request.step.batch_size.batch_size
        assert batch_size
        traced = TracedStep(
            trace=ledger.trace(),
            batch_size=batch_size,
            calls=ledger.calls,
            caveats=(
                *caveats(
                    request.step,
                    ledger.calls,
                    card=request.device,
                    is_compilation_told=code.has_compiled or code.is_noted,
                    has_no_operators=code.has_no_operators,
                ),
                *self._mode.assumed,
            ),
            num_flops=self._num_flops[-1] - self._num_flops[-2],
            sent_bytes=self._sent_bytes[-1] - self._sent_bytes[-2],
            num_batches=(self._training.accumulate if self._training else 1) * self._num_parts,
            origins=ledger.origins,
            modules=self._infos,
            has_compiled_passes=code.has_compiled_passes,
        )
        try:
            return grown(traced, self.marks.repeated_parts, ledger.cuts())
        except Irregular as error:
            return error

    def _parallelize(self, ranks: Ranks) -> None:
        """Parallelize the model, as the training does before its first step."""
        step, mode = self._request.step, self._mode
        # Its tensors start where the user's are.
        self.marks.add_model(tensor.device.type for _, tensor in in_order_of_moving(step.model))
        mode.is_recording = True
        before = dict(self._model.named_parameters())
        parallel = ranks.parallelize(self._model, "cuda" if mode.spec else "cpu")
        if isinstance(parallel, Pipeline):
            if step.lightning is not None:
                raise PipelineError(
                    "A LightningModule cannot run in a pipeline: Lightning has no strategy for "
                    "that. Give the step of the module in it: "
                    "TrainingStep(model, batch, loss=...)."
                )
            self._model, self._num_parts = parallel.named, parallel.num_microbatches
        self.marks.follow(self._model, parallel if ranks.compiles_wrapper else None)
        self.marks.label_model()
        after = dict(self._model.named_parameters())
        # A stage may have other names for the same parameters; parameters that have replaced
        # others elsewhere have the same names.
        own = {id(parameter) for parameter in before.values()}
        successors = {
            id(parameter if id(parameter) in own else before.get(name)): parameter
            for name, parameter in after.items()
        }
        if successors.keys() != own or any(
            number != id(parameter) for number, parameter in successors.items()
        ):
            self._parts = [moved_to(part, successors) for part in self._parts]
        if step.lightning is None:
            self._model = parallel
        else:
            step.lightning.call_through(self._model, parallel)

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        step, parts = self._training, self._parts
        if step is None:
            return ()
        optimizers = tuple(map(optimizer_from, parts)) if parts else step.optimizers_of(self._model)
        if step.change_optimizers is not None:
            optimizers = tuple(step.change_optimizers(optimizers))
        if parts:
            self.marks.add_states(optimizers)
        # Those that update in the backward pass.
        self._in_hooks = [
            optimizer
            for optimizer in optimizers_in_hooks(self._model.modules())
            if optimizer not in optimizers
        ]
        self.marks.add_states(self._in_hooks)
        run_to_the_end(optimizers)
        return optimizers

    def _new_batches(self, step: Step, number: int) -> list[Any]:
        assert self._batches is not None
        return self._batches.new(step, self._sizes(step), number)

    def _sizes(self, step: Step) -> BatchSizes:
        """The sizes that are asked for; a training that comes before a forward pass has its own."""
        request = self._request
        is_resized = step is request.step
        return BatchSizes(
            (request.batch_size if is_resized else None) or step.batch_size.batch_size or 0,
            (request.sequence_length if is_resized else None) or step.sequence_length,
        )


def _is_left_on_host(it: object, step: Step) -> bool:
    """Whether something stays on the host: it is there, while the model is on a device."""
    on_device = [any(tensor.is_cuda for tensor in _tensors_of(one)) for one in (it, step.model)]
    return on_device == [False, True]


def _tensors_of(it: object) -> Iterator[torch.Tensor]:
    if isinstance(it, torch.nn.Module):
        return (tensor for _, tensor in in_order_of_moving(it))
    return tensors_in(it)


def _modules_in(root: object) -> Iterator[torch.nn.Module]:
    """A module and all below it, those in plain lists and mappings too."""
    seen: set[int] = set()
    left = [root]
    while left:
        found = left.pop()
        if id(found) in seen or not isinstance(found, (torch.nn.Module, list, tuple, dict)):
            continue
        seen.add(id(found))
        if isinstance(found, torch.nn.Module):
            yield found
            left += [*found.children(), *vars(found).values()]
        else:
            left += contents_of(found) or ()
