"""trace(request): run a step on fake tensors, and return a TracedStep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.types import Stage
from memcallback.cuda.decompositions.registry import registered
from memcallback.step.copies.functions import (
    untouched_variables,
)
from memcallback.step.copies.modes import untouched_globals
from memcallback.step.copies.program import untouched_program
from memcallback.step.inference_step import InferenceStep
from memcallback.step.loss import default_loss, is_passed_by_name
from memcallback.step.ranks import Ranks, newer_torch_needed
from memcallback.step.step import Step
from memcallback.step.training_step import TrainingStep
from memcallback.trace.caveats import not_compiled
from memcallback.trace.copied_run import CopiedRun
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.dispatch.placeholders import Bounds
from memcallback.trace.growth import NUM_BEFORE, NUM_COMPARED
from memcallback.trace.loops.batches import BatchHookError
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
from memcallback.trace.repetitions import Irregular
from memcallback.trace.request import TraceRequest
from memcallback.trace.traced_step import TracedStep

_OTHER_FAILS = (
    "All batches are assumed to have the same size, because a batch {} cannot be traced. Perhaps "
    "it fails in the training too: {}"
)
_HOOKS_FAIL = (
    "What the module's hooks allocate as they bring a batch to the device is left out, because the "
    "step fails in a prediction with them: {}"
)
_LEAVE_IT_OUT = (
    "If the training fails there too, mend the step. If not, leave that code out: "
    "memcallback.TrainingStep(model, batch, loss=...)."
)
_GIVE_LOSS = (
    "The step has no loss, so its model is called {}: give "
    "TrainingStep(model, batch, loss=lambda model, batch: ...), which calls it as your loop does."
)
_GIVE_FORWARD = (
    "Leave that code out, or call the model as your program does: "
    "InferenceStep(model, batch, forward=lambda model, batch: ...)."
)
#: After how many tokens or batches the same kernels run again; some pad to multiples of 8.
_PERIODS = (1, 8)
_NOT_REGULAR = (
    "The memory of later {0} cannot be predicted from the first ones: {1}. Give at most {2} {0}; "
    "then each one is traced."
)
#: Patches must be undone in the reverse order.
_ONE_AT_A_TIME = threading.RLock()


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
    if (
        isinstance(result, PredictionError)
        and mode.placeholders.open_shapes
        and not request.takes_known_shapes
    ):
        # Code that counts on the true shape fails on the largest one.
        known, _, _ = _attempt(replace(request, takes_known_shapes=True), rank)
        if not isinstance(known, PredictionError):
            return known
    if not isinstance(result, PredictionError):
        return result
    if isinstance(result, BatchHookError):
        traced = _trace(replace(request, runs_batch_hooks=False), rank)
        return _with_caveat(traced, str(result))
    if request.has_moved_batches:
        # A hook may have made something of fakes that it makes of no tensor.
        without, _, _ = _attempt(replace(request, runs_batch_hooks=False), rank)
        if not isinstance(without, PredictionError):
            return _with_caveat(without, _HOOKS_FAIL.format(result))
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
    code = CompiledCode(mode, request.training, compiles=request.compiles)
    step = request.step
    reached = [*step.functions_to_copy(), *map(type, step.model.modules())]
    try:
        with untouched_program(reached) if request.restores_program else nullcontext():
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
        mode.calibrate(is_threaded=has_own_thread)
        run = CopiedRun(request, mode, code, rank.ranks if rank else None)
        with _semantics(step, mode, rank):
            try:
                run.run()
            except PredictionError:
                raise
            except ENDS as error:  # user code on fakes can fail, and end, in any way
                raise_if_meant(error)
                raise run.marks.failure(error, _hint(step)) from error
            finally:
                run.close()
    return run.as_traced(code)


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
