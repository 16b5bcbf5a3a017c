"""trace(step): run a step on fake tensors, return a TracedStep."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.module_table import ModuleInfo
from memcallback.cuda.convolution.cudnn import is_driver_installed
from memcallback.cuda.convolution.rule import workspaces_are_known
from memcallback.cuda.decompositions.registry import registered
from memcallback.cuda.decompositions.rnn import flatten_rnn_weights
from memcallback.devices.catalogue import DeviceSpec
from memcallback.step.copies.fakes import fake_copy, untouched_globals
from memcallback.step.copies.functions import untouched_variables
from memcallback.step.copies.optimizers import (
    fill_history,
    optimizer_from,
    optimizer_parts,
    run_to_the_end,
)
from memcallback.step.copies.resizing import resize_batch
from memcallback.step.loss import default_loss, is_passed_by_name
from memcallback.step.pipeline import Pipeline
from memcallback.step.ranks import Ranks, newer_torch_needed
from memcallback.step.training_step import TrainingStep
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.dispatch.placeholders import Bounds
from memcallback.trace.loops.loop import run_window
from memcallback.trace.loops.passes import Copies
from memcallback.trace.marks import TraceMarks, in_order_of_moving
from memcallback.trace.patches.cuda import cuda_semantics
from memcallback.trace.patches.libraries import fakes_as_real, one_sequence_a_row
from memcallback.trace.patches.rank_messages import Messages, with_messages
from memcallback.trace.traced_step import TracedStep

_FULL_HISTORY = "LBFGS runs all its iterations, and from the second update on its history is full"
_WITHOUT_IT = "Give a step without it: memcallback.TrainingStep(model, batch, loss=...)."
_NO_LOSS = (
    "The step has no loss, so its model is called {}: give TrainingStep(model, batch, loss=lambda model, batch: ...), which calls it as your "
    "loop does."
)
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
    """
    wanted = _Wanted(step, device, batch_size, sequence_length, num_windows)
    own_bounds = bounds or Bounds()
    ranks = step.ranks
    if ranks is None:
        return _traced(wanted, own_bounds)
    if needed := newer_torch_needed():
        raise PredictionError(
            f"A rank of a job is predicted with PyTorch {needed} or later, and this is {torch.__version__}. Install a later one, or leave ranks "
            "out for one device."
        )
    return with_messages(
        lambda rank, messages: _traced(
            wanted,
            own_bounds if rank == ranks.rank else Bounds(),
            _Place(ranks.as_rank(rank), messages),
        ),
        ranks.rank,
    )


@dataclass(frozen=True)
class _Wanted:
    """What is to be traced: as the arguments of `trace`."""

    step: TrainingStep
    device: DeviceSpec | None
    batch_size: int | None
    sequence_length: int | None
    num_windows: int | None


@dataclass(frozen=True)
class _Place:
    """Which rank of a job the traced one is, and the messages that it has from the others."""

    ranks: Ranks
    messages: Messages


def _traced(wanted: _Wanted, bounds: Bounds, place: _Place | None = None) -> TracedStep:
    """One rank's step; without a place, that of a training on one device."""
    step = wanted.step
    bounds.restart()
    mode = TraceMode(Ledger(), wanted.device, bounds)
    with (
        _ONE_AT_A_TIME,
        untouched_globals(),
        untouched_variables(step.model, step.losses),
        fakes_as_real(mode.assumed),
    ):
        mode.calibrate()
        training = _Training(wanted, mode, place.ranks if place else None)
        with _semantics(mode, place):
            try:
                training.run()
            except PredictionError:
                raise
            except Exception as error:  # user code on fakes can fail in any way
                raise training.marks.failure(error, _way_out(step)) from error
            finally:
                training.close()
    return training.as_traced()


def _way_out(step: TrainingStep) -> str:
    """What to do about code of the user's that failed, perhaps because nobody said how the model is
    called with a batch of several parts.
    """
    if step.loss is not default_loss or isinstance(step.batch, torch.Tensor):
        return _WITHOUT_IT
    return _NO_LOSS.format(
        "as model(**batch)" if is_passed_by_name(step.model, step.batch) else "with the whole batch"
    )


@contextmanager
def _semantics(mode: TraceMode, place: _Place | None) -> Iterator[None]:
    """Inside, Python's lines do what they would do on the device, and of a job on the rank."""
    with ExitStack() as stack:
        if mode.spec:
            stack.enter_context(cuda_semantics(mode, mode.spec))
        else:
            stack.enter_context(registered(None))
            stack.enter_context(mode)
        stack.enter_context(one_sequence_a_row(mode))
        stack.enter_context(torch.enable_grad())
        if place is not None:
            # Importing it takes PyTorch's distributed tensors.
            from memcallback.trace.patches.distributed import rank_answers

            stack.enter_context(place.ranks.world())
            stack.enter_context(rank_answers(mode, place.messages))
        yield


class _Training:
    """A training on copies of fake tensors, from the model's way to the device on."""

    def __init__(self, wanted: _Wanted, mode: TraceMode, ranks: Ranks | None) -> None:
        self._wanted, self._mode, self._ranks = wanted, mode, ranks
        step = wanted.step
        parts = [optimizer_parts(optimizer) for optimizer in step.given_optimizers]
        self._model, self._batch, self._parts = fake_copy((step.model, step.batch, parts), mode)
        #: Where the user's parameters and buffers are: types of devices, in the order in which they
        #: would be moved.
        self._places = [tensor.device.type for _, tensor in in_order_of_moving(step.model)]
        for module in self._model.modules() if mode.spec else ():
            for name, value in vars(module).items():
                if isinstance(value, torch.device):
                    vars(module)[name] = CUDA
        self.marks = TraceMarks(mode, self._model)
        #: Into how many parts a batch is cut, each of as many samples as are wanted.
        self._num_parts = 1
        self._infos: tuple[ModuleInfo, ...] = ()
        #: Up to the end of each update.
        self._num_flops, self._sent_bytes = [0], [0]

    def run(self) -> None:
        """Run as many updates as are wanted."""
        step, mode = self._wanted.step, self._mode
        if step.prepare is not None:
            self._batch = step.prepare(self._model, self._batch)
        if mode.spec:
            flatten_rnn_weights(self._model)
        self._move()
        optimizers = self._make_optimizers()
        self._infos = self.marks.module_infos()
        device_type = "cuda" if mode.spec else "cpu"
        copies = Copies(
            model=self._model,
            optimizers=optimizers,
            new_batch=self._new_batch,
            marks=self.marks,
            device_type=device_type,
        )
        num_windows = (
            self._wanted.num_windows
            or (self._ranks.num_updates_to_settle if self._ranks else 1) + 1
        )
        with self.marks.modules_named():
            for window in range(num_windows):
                run_window(step, copies)
                self._num_flops.append(mode.num_flops)
                self._sent_bytes.append(mode.sent_bytes)
                if window == 0 and fill_history(optimizers):
                    self.marks.label_states(optimizers)
                    mode.assumed[_FULL_HISTORY] = None

    def close(self) -> None:
        """Nothing more is written down, and nothing is kept alive."""
        mode = self._mode
        mode.is_recording = False
        mode.ledger.close()
        mode.in_flight.close()
        # A gradient is a part of its tensor that Python's garbage collector does not see: left
        # there, it would keep all this alive.
        for parameter in self._model.parameters():
            parameter.grad = None
        mode.modules = None

    def as_traced(self) -> TracedStep:
        """What was written down."""
        ledger, num_flops, sent_bytes = self._mode.ledger, self._num_flops, self._sent_bytes
        return TracedStep(
            trace=ledger.trace(),
            batch_size=self._batch_size,
            calls=ledger.calls,
            caveats=tuple(self._mode.assumed),
            num_flops=num_flops[-1] - num_flops[-2],
            sent_bytes=sent_bytes[-1] - sent_bytes[-2],
            num_batches=self._wanted.step.accumulate * self._num_parts,
            origins=ledger.origins,
            modules=self._infos,
        )

    @property
    def _batch_size(self) -> int:
        batch_size = self._wanted.batch_size or self._wanted.step.batch_size.batch_size
        assert batch_size
        return batch_size

    def _move(self) -> None:
        """The model comes to the device, and in a job is spread over the ranks."""
        if self._ranks is None:
            self.marks.add_model()
            self._mode.is_recording = True
            return
        self._model, self._parts = self.marks.parallelize(
            self._ranks, self._wanted.step.lightning, self._parts, self._places
        )
        if isinstance(self._model, Pipeline):
            self._num_parts = self._model.num_microbatches

    def _make_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        step, parts = self._wanted.step, self._parts
        optimizers = tuple(map(optimizer_from, parts)) if parts else step.optimizers_of(self._model)
        if step.change_optimizers is not None:
            optimizers = tuple(step.change_optimizers(optimizers))
        if parts:
            self.marks.add_states(optimizers)
        run_to_the_end(optimizers)
        return optimizers

    def _new_batch(self) -> Any:
        wanted, given = self._wanted, self._wanted.step.batch_size.batch_size or 0
        before, after = wanted.step.sequence_length, wanted.sequence_length
        lengths = (before, after) if before and after else None
        with self._mode.unrecorded():
            fresh = resize_batch(
                self._batch, given, self._num_parts * (wanted.batch_size or given), lengths=lengths
            )
        self.marks.add_batch(fresh)
        return fresh


_UNKNOWN_WORKSPACES = "Convolution workspaces are estimates: cuDNN's own answers need it installed (pip install nvidia-cudnn-cu12) and benchmark mode off."
_NO_DRIVER = (
    "cuDNN was asked for convolution workspaces without a CUDA driver, where it passes over some of its engines (seen with depthwise "
    "convolutions in half precision)."
)
_COMPILED = "A compiled module was traced as it would run without compilation."


def _caveats(step: TrainingStep, traced: TracedStep) -> Iterator[str]:
    if step.batch_size.is_ambiguous:
        yield (
            f"The tensors of the batch differ in their first dimension; {step.batch_size.batch_size}, the most frequent, was taken for the "
            "batch size."
        )
    if any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in step.model.modules()
    ):
        yield _COMPILED
    if step.ranks is not None:
        rank = f"Rank {step.ranks.rank} of {step.ranks.world_size} under {step.ranks.name}"
        yield f"{rank}: PyTorch's engines ran on fakes as they do where collectives take no time."
    if any("convolution" in call.operator for call in traced.calls):
        if not workspaces_are_known():
            yield _UNKNOWN_WORKSPACES
        elif not is_driver_installed():
            yield _NO_DRIVER
