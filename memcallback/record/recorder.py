"""MemoryRecorder: turn loop boundaries into StepMemory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from memcallback.core.errors import warn_and_go_on
from memcallback.core.module_table import ModuleInfo
from memcallback.core.phase_spans import PhaseSpans
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.core.validation import whole_number
from memcallback.devices.local import default_device
from memcallback.devices.meters import AllocatorMeter, CpuMeter, Meter
from memcallback.diagnose.out_of_memory.explain import explain
from memcallback.diagnose.out_of_memory.observer import forget, shortage_in
from memcallback.diagnose.out_of_memory.observer import listen as listen_for_moments
from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport
from memcallback.prediction.prediction import StepPrediction
from memcallback.record.module_timeline import ModuleTimeline
from memcallback.record.open_step import OpenStep
from memcallback.record.recording import Recording
from memcallback.record.watch import FirstCall, Watch
from memcallback.step.batch import INFERRED, infer_batch_size
from memcallback.step.copies.optimizers import unwrapped
from memcallback.step.holdings import holdings
from memcallback.step.module_follower import module_infos

#: An attribute of errors that were told.
_TOLD = "_is_told_by_memcallback"
#: In a sentence.
_WORDS = {
    Phase.FORWARD: "forward pass",
    Phase.BACKWARD: "backward pass",
    Phase.OPTIMIZER_STEP: "optimizer step",
}
#: Steps are always sampled until so many updates were made: the warm-up, the first steady window,
#: and one after it.
NUM_FIRST_SAMPLED = 3
Models = torch.nn.Module | Iterable[torch.nn.Module]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


class StepListener(Protocol):
    """What is told of a recorder's steps; nothing of it may raise."""

    def wants_step(self) -> bool | None:
        """Whether the step that begins is to be recorded also where only sampled ones are."""

    def on_step(self, record: StepMemory) -> None:
        """A step was recorded."""

    def on_out_of_memory(self, error: BaseException) -> None:
        """Memory ran out; a step that is open is not over yet."""

    def close(self) -> None:
        """The recorder is closed."""


class MemoryRecorder(Recording):
    """Records the memory of training steps, in any loop.

    On CUDA every step costs five reads of the allocator's counters and no synchronisation. What
    model, optimizers and batch hold, by category, is counted on sampled steps only: those of the
    first three updates and of every `sample_every_n_steps`-th after them (an accumulation window is
    sampled whole). On a CPU only sampled steps are recorded.

    Args:
        model: The model or models, for the split by category; on a CPU, for any figure but the
            resident size.
        optimizer: The optimizer or optimizers, for their state, and to know which steps made an
            update; without any, each optimizer step is taken for one.
        device: What to read; by default the model's device, else the current accelerator, else the
            CPU.
        sample_every_n_steps: At least 1.
        reset_peaks: Whether the allocator's peaks are reset at each boundary (see
            `AllocatorMeter`).
        use_profiler: Whether a CPU is read through PyTorch's profiler, of which a thread can have
            one at a time; else only the resident size is read.
        per_module: Whether sampled steps are also read wherever another module begins to run,
            forward and backward (see `modules`). That takes the host some 50 µs for each reading
            (benchmarks/per_module.py); other steps have no hooks.

    Attributes:
        warm_up: The last step that no optimizer update came before; None if there was none.
        steady: Of the steady steps on which holdings were counted, the one whose phases' peaks add
            up to the most; None if there was none.
        largest: Of all steady steps, the one with the largest peak; None if there was none.
        lifetime_peak_allocated_bytes: The largest allocated figure of the process so far, between
            steps and before the first one included; what `torch.cuda.max_memory_allocated()` would
            say without the resets. None before the first step.
        lifetime_peak_reserved_bytes: The same for reserved memory.
        lifetime_peak_resident_bytes: The same for the resident size of the process (CPU).
        out_of_memory: Of the last out-of-memory error in a step; None if there was none.

    Raises:
        ValueError: If `sample_every_n_steps` is below 1.
        TypeError: If it is no whole number.
        MeterUnavailableError: If the device cannot be read.

    Examples:
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> recorder = MemoryRecorder(model, optimizer)
        >>> with recorder.step(batch_size=32):
        ...     with recorder.phase(Phase.FORWARD):
        ...         loss = model(torch.ones(32, 10)).sum()
        ...     with recorder.phase(Phase.BACKWARD):
        ...         loss.backward()
        ...     with recorder.phase(Phase.OPTIMIZER_STEP):
        ...         optimizer.step()
        >>> [phase.label for phase in recorder.steps[-1].phases]
        ['forward', 'backward', 'optimizer step']
    """

    def __init__(
        self,
        model: Models | None = None,
        optimizer: Optimizers | None = None,
        *,
        device: torch.device | str | None = None,
        sample_every_n_steps: int = 50,
        reset_peaks: bool = True,
        use_profiler: bool = True,
        per_module: bool = False,
    ) -> None:
        self._sample_every_n_steps = whole_number(
            "sample_every_n_steps", sample_every_n_steps, "Leave it out for every 50th step."
        )
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []
        self._device = None if device is None else torch.device(device)
        self._reset_peaks = reset_peaks
        self._use_profiler = use_profiler
        self._per_module = per_module
        self._module_infos: tuple[ModuleInfo, ...] | None = None
        self._add(model, optimizer)
        super().__init__(self._new_meter())
        listen_for_moments()
        self.out_of_memory: OutOfMemoryReport | None = None
        self._num_steps = 0
        self._num_updates = 0
        self._sampled_since = 0
        self._open: OpenStep | None = None
        self._is_skipping = False
        self._watch: Watch | None = None
        self._listeners: list[StepListener] = []

    def _add(self, model: Models | None, optimizer: Optimizers | None) -> None:
        models = (
            [] if model is None else [model] if isinstance(model, torch.nn.Module) else list(model)
        )
        optimizers = (
            []
            if optimizer is None
            else [optimizer]
            if isinstance(optimizer, torch.optim.Optimizer)
            else list(optimizer)
        )
        self._modules += [one for one in models if all(one is not known for known in self._modules)]
        self._module_infos = None
        # The optimizer shall not keep the recorder, and with it the model, alive.
        this = weakref.ref(self)
        for one in map(unwrapped, optimizers):
            if all(one is not known for known in self._optimizers):
                self._optimizers.append(one)
                self._hooks.append(one.register_step_post_hook(lambda *_: _count_update(this)))

    def _new_meter(self) -> Meter:
        chosen = default_device(self._modules) if self._device is None else self._device
        if chosen.type == "cpu":
            return CpuMeter(reset_peaks=self._reset_peaks, use_profiler=self._use_profiler)
        return AllocatorMeter(chosen, reset_peaks=self._reset_peaks)

    def watch(
        self,
        model: Models | None = None,
        optimizer: Optimizers | None = None,
        *,
        batch_size: int | None = None,
        per_module: bool = True,
        on_first_call: FirstCall | None = None,
    ) -> Watch:
        """Let steps and their phases mark themselves from here on, by hooks on models and
        optimizers: the loop stays as it is.

        A step begins when a model is called in training mode and with gradients, and ends when each
        optimizer has made its update; under gradient accumulation, when the next batch comes. A
        forward pass without a backward pass belongs to the step of the next one. Where a batch has
        several backward passes that are to be one step (a GAN), put its body into `with
        recorder.step(batch):`; phases mark themselves inside it too. What is done by
        `torch.autograd.grad` counts to the phase in which it is called.

        Args:
            model: The model or models that the loop calls, besides those of the recorder.
            optimizer: The optimizer or optimizers, besides those of the recorder.
            batch_size: Samples in a batch, if they are not to be inferred from what the model is
                called with.
            per_module: Whether sampled steps are recorded by module too (see `modules`), even if
                the recorder was not asked for that.
            on_first_call: Is called before the first step begins, with the arguments by position
                and those by name with which a model is called.

        Returns:
            The watch. It ends when it is closed (it is a context manager), when the recorder is
            closed, or at the next call of this method.

        Raises:
            ValueError: If there is no model, or the batch size is below 1.
            TypeError: If the batch size is no whole number.

        Examples:
            >>> model = torch.nn.Linear(10, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> recorder = MemoryRecorder()
            >>> with recorder.watch(model, optimizer):
            ...     model(torch.ones(32, 10)).sum().backward()
            ...     optimizer.step()
            >>> recorder.steps[-1].batch_size, [phase.label for phase in recorder.steps[-1].phases]
            (32, ['forward', 'backward', 'optimizer step'])
        """
        if not self._modules:
            if model is None:
                raise ValueError(
                    "There is no model to watch. Give it: recorder.watch(model, optimizer)."
                )
            self._add(model, optimizer)
            self.meter = self._new_meter()
        else:
            self._add(model, optimizer)
        self._per_module = self._per_module or per_module
        if self._watch is not None:
            self._watch.close()
        self._watch = Watch(
            self,
            self._modules,
            self._optimizers,
            batch_size=batch_size,
            on_first_call=on_first_call,
        )
        return self._watch

    def listen(self, listener: StepListener) -> None:
        """Tell somebody of every step from here on, until the recorder is closed."""
        self._listeners.append(listener)

    def unlisten(self, listener: StepListener) -> None:
        """Tell them no more."""
        self._listeners = [one for one in self._listeners if one is not listener]

    def close(self) -> None:
        """End the recording: take back the hooks, drop an open step, let go of the model. Reports
        go on.
        """
        if self._watch is not None:
            self._watch.close()
        for hook in self._hooks:
            hook.remove()
        self.drop_step()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        self._watch, self._hooks, self._modules, self._optimizers = None, [], [], []

    def drop_step(self) -> None:
        """Forget the open step, if there is one: nothing says when it ended."""
        self._is_skipping = False
        if self._open is not None:
            step, self._open = self._open, None
            step.end_reading()

    @contextmanager
    def step(self, batch: object = None, *, batch_size: int | None = None) -> Iterator[None]:
        """One training step: one batch, with its phases inside. If memory runs out in it, a report
        is printed to stderr.

        Args:
            batch: The batch, to count its storages as input and its samples.
            batch_size: Samples in the batch, if they are not to be inferred from it.

        Raises:
            RuntimeError: If a step is open already.
        """
        self.begin_step(batch, batch_size=batch_size)
        try:
            yield
        except BaseException:
            self.end_step(is_interrupted=True)
            raise
        self.end_step()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """One phase inside a step. A phase may come several times in a step.

        Raises:
            RuntimeError: If no step is open.
            TypeError: If `phase` is not a `Phase`.
        """
        if not isinstance(phase, Phase):
            raise TypeError(
                f"phase must be a memcallback.Phase, got {phase!r}. Use Phase.FORWARD, Phase.BACKWARD or Phase.OPTIMIZER_STEP."
            )
        if self._open is None and not self._is_skipping:
            raise RuntimeError(
                f"The phase {phase.label!r} is outside a step. Put it inside `with recorder.step(batch_size=...):`."
            )
        self.open_phase(phase)
        try:
            yield
        except BaseException:
            if self._open is not None:
                self._open.failed_in = phase
            raise
        finally:
            self.close_phase()

    # The same as calls, for loops whose boundaries are hooks.

    @property
    def num_updates(self) -> int:
        """Optimizer updates since the recording began."""
        return self._num_updates

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and not ended, be it recorded or not."""
        return self._open is not None or self._is_skipping

    @property
    def current_phase(self) -> Phase | None:
        """The phase that is open and did begin; None between phases, and in one that is
        provisional.
        """
        return self._open.current_phase if self._open else None

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The models; none once the recorder is closed."""
        return tuple(self._modules)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers; none once the recorder is closed."""
        return tuple(self._optimizers)

    @property
    def open_batch(self) -> object:
        """The batch of the step that is open; None if none is."""
        return self._open.batch if self._open else None

    def begin_step(
        self, batch: object = None, *, batch_size: int | None = None, sample: bool = False
    ) -> None:
        """Begin a step.

        Args:
            batch: As for `step`.
            batch_size: As for `step`.
            sample: Record this step too on a device where only sampled steps are.

        Raises:
            RuntimeError: If a step is open already.
            ValueError: If the batch size is below 1.
            TypeError: If it is no whole number.
        """
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, INFERRED)
        if self._open is not None and self._watch is not None:
            self._watch.give_up_step()
        if self._open is not None:
            raise RuntimeError(
                "A step is open already: end it first, and do not nest `with recorder.step():`."
            )
        sample = sample or any(listener.wants_step() for listener in self._listeners)
        is_sampled = self._is_due() or (sample and not self.meter.reads_every_step)
        self._is_skipping = not (is_sampled or self.meter.reads_every_step)
        forget()
        if self._is_skipping:
            self._num_steps += 1
            return
        size = infer_batch_size(batch).batch_size if batch_size is None else batch_size
        counts_holdings = is_sampled and bool(self._modules)
        self._open = OpenStep(
            batch,
            size,
            counts_holdings=counts_holdings,
            num_updates_before=self._num_updates,
            phases=PhaseSpans(self._read),
            meter=self.meter,
            watch=self._new_module_watch() if counts_holdings and self._per_module else None,
        )
        self._open.begin()

    def _read(self) -> None:
        step = self._open
        assert step is not None
        step.read(
            holdings(self._modules, self._optimizers, step.batch, self.meter.device)
            if step.counts_holdings
            else None
        )

    def _new_module_watch(self) -> ModuleTimeline:
        if self._module_infos is None:
            self._module_infos = module_infos(self._modules)
        return ModuleTimeline(self._modules, self._module_infos, self.meter)

    def _is_due(self) -> bool:
        # Updates, since an accumulation window has several steps; steps where updates are not
        # counted.
        progress = self._num_updates if self._hooks else self._num_steps
        if progress - self._sampled_since >= self._sample_every_n_steps:
            self._sampled_since = progress
        return progress < NUM_FIRST_SAMPLED or progress == self._sampled_since

    def open_phase(self, phase: Phase, *, is_provisional: bool = False) -> None:
        """Begin a phase, ending the one that is open at the same reading.

        An optimizer step right after a backward pass begins with the reading that ended it: nothing
        happens between them that a person would look for, and a step stays at five reads.

        Args:
            phase: The phase.
            is_provisional: It begins at the last reading, and did not happen if the step ends or
                another provisional phase or an optimizer step begins without a reading in between.
        """
        forget()
        if self._open is not None:
            self._open.open_phase(phase, is_provisional=is_provisional)

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """End the open phase, if there is one.

        Args:
            covers: All the phases that were in this window, where nothing marked the boundary
                between them.
        """
        if self._open is not None:
            self._open.close_phase(covers=covers)

    def end_reading(self) -> None:
        """No boundary of the open step is read from here on: on a CPU, PyTorch's profiler is free."""
        if self._open is not None:
            self._open.close_phase()
            self._open.end_reading()

    def end_step(self, *, is_interrupted: bool = False) -> StepMemory | None:
        """End the step and keep its record.

        Args:
            is_interrupted: An exception ended it.

        Returns:
            The record; None if this step was not read.
        """
        if is_interrupted:
            with suppress(Exception):  # the error itself goes on, and the step ends
                self.failed(sys.exc_info()[1])
        self._is_skipping = False
        step = self._open
        if step is None:
            return None
        step.end_phases()
        self._open = None
        self._num_steps += 1
        if not self._hooks and not is_interrupted and step.has_update:
            self._num_updates += 1
        num_updates = self._num_updates - step.num_updates_before if self._hooks else None
        record, stats, modules = step.to_memory(
            index=self._num_steps - 1, num_updates=num_updates, is_interrupted=is_interrupted
        )
        self._keep(record, stats, modules)
        for listener in tuple(self._listeners):
            listener.on_step(record)
        return record

    def failed(self, error: BaseException | None) -> None:
        """An error has ended a step, or goes through the loop between steps: if memory ran out,
        that is said, once.

        Listeners say it, with what they know of the training; without any, the report is printed to
        stderr.

        Args:
            error: The error, with the frames that it went through; None for none.
        """
        shortage = None if error is None else shortage_in(error)
        if error is None or shortage is None or getattr(shortage, _TOLD, False):
            return
        for listener in tuple(self._listeners):
            listener.on_out_of_memory(error)
        if not self._listeners and (report := self.explain(error)) is not None:
            print(report.to_text(), file=sys.stderr)

    def explain(
        self,
        error: BaseException,
        prediction: StepPrediction | None = None,
        *,
        where: str = "",
        batch: object = None,
        rank: int | None = None,
    ) -> OutOfMemoryReport | None:
        """Say what stood when memory ran out, while the frames of the error still hold it; for who
        catches errors of a loop.

        Args:
            error: The error.
            prediction: What was predicted of a training step, at any batch size; outside of one it
                says nothing.
            where: What was going on outside of steps, such as `validation`.
            batch: The batch there, if it is no step's.
            rank: Of a job of several ranks that of this process.

        Returns:
            The report, which is also kept in `out_of_memory`; None if the error is another one, or,
            with a warning, if nothing can be said.
        """
        shortage = shortage_in(error)
        if shortage is None:
            return None
        with suppress(Exception):  # an error of a kind that takes no attributes is told again
            setattr(shortage, _TOLD, True)
        step = self._open
        phase = (step.failed_in or step.current_phase) if step else None
        batch = step.batch if step else batch
        try:
            self.out_of_memory = explain(
                shortage,
                modules=self._modules,
                optimizers=self._optimizers,
                batch=batch,
                batch_size=step.batch_size if step else infer_batch_size(batch).batch_size,
                device=self.meter.device,
                device_name=self.meter.device_name,
                phase=_WORDS[phase] if phase else where,
                step=self._num_steps + 1 if step else None,
                prediction=prediction if step else None,
                rank=rank,
            )
        except Exception as other:  # of whatever state a device that is full leaves things in, the error itself goes on
            warn_and_go_on(
                f"The out-of-memory error could not be explained: {type(other).__name__}: {str(other).rstrip('.')}. It goes on as it is."
            )
            return None
        return self.out_of_memory


def _count_update(recorder: weakref.ref[MemoryRecorder]) -> None:
    if (found := recorder()) is not None:
        found._num_updates += 1
