"""MemoryRecorder: records training steps as StepMemory, from marks of the loop or from hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memcallback.batch_size.bounds import DEFAULT_BOUNDS, BatchSizeBounds
from memcallback.core.interruptions import remember_handlers
from memcallback.core.module_table import ModuleTable
from memcallback.core.phase_spans import PhaseSpans
from memcallback.core.step_memory import DeviceMemory, StepMemory
from memcallback.core.types import Phase
from memcallback.core.validation import DEFAULT_HEADROOM, whole_number
from memcallback.devices.local import default_device
from memcallback.devices.meters import AllocatorMeter, CpuMeter, Meter
from memcallback.diagnose.out_of_memory.context import OomContext
from memcallback.diagnose.out_of_memory.observer import forget_failure, record_failures
from memcallback.prediction.prediction import StepPrediction
from memcallback.record.oom_response import explain_or_warn, forget_explained, is_new_shortage
from memcallback.record.open_step import Followed, Models, OpenStep, Optimizers, num_rebuilt
from memcallback.record.rank_exchange import rank_here
from memcallback.record.recording import Recording
from memcallback.record.sampling import Sampling
from memcallback.record.watch import FirstCall, Watch
from memcallback.report.report import Report
from memcallback.step.batch import INFERRED, infer_batch_size

if TYPE_CHECKING:
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport

#: In a sentence.
_WORDS = {
    Phase.FORWARD: "forward pass",
    Phase.BACKWARD: "backward pass",
    Phase.OPTIMIZER_STEP: "optimizer step",
}


class StepListener(Protocol):
    """Callbacks of a `MemoryRecorder`. They must not raise."""

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction of the steps, for the report on an out-of-memory error."""

    def wants_step(self) -> bool | None:
        """Whether to record the step that begins, also where only sampled steps are."""

    def on_step(self, record: StepMemory, batch: object) -> None:
        """A step was recorded."""

    def on_out_of_memory(self, report: OutOfMemoryReport, error: BaseException) -> None:
        """Memory ran out; an open step has not ended yet."""

    def close(self) -> None:
        """The recorder is closed."""


class MemoryRecorder:
    """Records the memory of training steps, in any loop.

    On CUDA each step costs five reads of the allocator's counters and no synchronisation. The bytes
    held by model, optimizers and batch, by category, are counted on sampled steps only: those of
    the first three updates, then those of every `sample_every_n_steps`-th update (an accumulation
    window is sampled whole). On a CPU only sampled steps are recorded, and some of those that are
    logged (see `begin_step`).

    Args:
        model: The model or models. The split by category needs them; on a CPU, so does every value
            but the resident size.
        optimizer: The optimizer or optimizers, for their state, and to know which steps made an
            update; without any, each optimizer step counts as one.
        device: The device to read; by default the model's, else the current accelerator, else the
            CPU.
        sample_every_n_steps: Optimizer updates from one sampled step to the next, at least 1;
            without an optimizer, steps.
        reset_peaks: Whether the allocator's peaks are reset where a phase starts or ends (see
            `MemoryCallback`).
        use_profiler: Whether a CPU is read through PyTorch's profiler; else, and while another
            profile of PyTorch runs, only the resident size is read. A process can have one
            profile at a time, and ours gives way. If you later start a profile with
            `profile_memory=True`, it also shows releases of memory that was allocated in sampled
            steps.
        per_module: Whether sampled steps are also read wherever another module begins to run,
            forward and backward (see `modules`). Each reading takes 24 to 85 µs on an H100
            (benchmarks/per_module.py); other steps have no hooks.

    Attributes:
        out_of_memory: The report on the last out-of-memory error in a step; None if there was none.

    Raises:
        ValueError: If `sample_every_n_steps` is below 1.
        TypeError: If it is not a whole number.
        MeterUnavailableError: If the device cannot be read. It is a `RuntimeError`, of
            `memcallback.devices.meters`.

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
        self._sampling = Sampling(
            whole_number(
                "sample_every_n_steps", sample_every_n_steps, "Leave it out for every 50th step."
            )
        )
        remember_handlers()
        self._followed = Followed()
        self._device = None if device is None else torch.device(device)
        self._reset_peaks = reset_peaks
        self._use_profiler = use_profiler
        self._per_module = per_module
        self._add(model, optimizer)
        self.meter = self._new_meter()
        self.history = Recording()
        record_failures()
        self.out_of_memory: OutOfMemoryReport | None = None
        self._open: OpenStep | None = None
        self._is_skipping = False
        self._watch: Watch | None = None
        self._listeners: list[StepListener] = []

    def _add(self, model: Models | None, optimizer: Optimizers | None) -> None:
        self._followed.add(model, optimizer, self._sampling.on_update)
        self._sampling.counts_updates = bool(self._followed.optimizers)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has what was recorded, as a closed recorder: it follows no model."""
        return vars(self) | {
            "meter": None if isinstance(self.meter, CpuMeter) else self.meter,
            "_device": self.meter.device,
            "history": copy(self.history),
            "_sampling": replace(self._sampling, counts_updates=False),
            "_followed": Followed(),
            "_open": None,
            "_is_skipping": False,
            "_watch": None,
            "_listeners": [],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["meter"] is None:  # of a CPU: it may hold a running profile
            self.meter = self._new_meter()

    def _new_meter(self) -> Meter:
        device = default_device(self.models) if self._device is None else self._device
        if device.type == "cpu":
            return CpuMeter(reset_peaks=self._reset_peaks, use_profiler=self._use_profiler)
        return AllocatorMeter(device, reset_peaks=self._reset_peaks)

    def watch(
        self,
        model: Models | None = None,
        optimizer: Optimizers | None = None,
        *,
        batch_size: int | None = None,
        per_module: bool = True,
        on_first_call: FirstCall | None = None,
    ) -> Watch:
        """Mark steps and phases from now on by hooks on models and optimizers.

        The loop stays as it is.

        A step begins when a model is called in training mode and with gradients. It ends when each
        optimizer has made its update; under gradient accumulation, when the next batch comes. A
        forward pass without a backward pass belongs to the step of the next forward pass. If a
        batch has several backward passes that are to be one step (a GAN), put the loop's body into
        `with recorder.step(batch):`; phases are still marked inside it. `torch.autograd.grad`
        counts towards the phase in which it is called.

        Args:
            model: The model or models that the loop calls, besides those of the recorder.
            optimizer: The optimizer or optimizers, besides those of the recorder.
            batch_size: Samples in a batch; by default inferred from the model's arguments.
            per_module: Whether sampled steps are recorded by module too (see `modules`), even if
                the recorder was made without that.
            on_first_call: Called before the first step begins, with the positional and the keyword
                arguments of the model's call.

        Returns:
            The watch. It ends when it is closed (it is a context manager), when the recorder is
            closed, or at the next call of this method.

        Raises:
            ValueError: If there is no model, or the batch size is below 1.
            TypeError: If the batch size is not a whole number.

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
        had_models = bool(self.models)
        if not had_models and model is None:
            raise ValueError(
                "There is no model to watch. Give it: recorder.watch(model, optimizer)."
            )
        self._add(model, optimizer)
        if not had_models:
            self.meter = self._new_meter()  # the model says which device to read
        self._per_module = self._per_module or per_module
        if self._watch is not None:
            self._watch.close()
        forget_explained()
        self._watch = Watch(
            self,
            self.models,
            self.optimizers,
            batch_size=batch_size,
            on_first_call=on_first_call,
        )
        return self._watch

    def count_beside(self, items: Iterable[object]) -> None:
        """Count these modules and tensors too, as parameters and buffers, as long as they exist.

        Args:
            items: Modules, and tensors in containers, that are on the device beside the models
                (see `TrainingStep`). `MemoryLog` and the callbacks call this for the step that
                they predict.
        """
        self._followed.add_beside(items)

    def listen(self, listener: StepListener) -> None:
        """Call a listener at every step from now on, until the recorder is closed."""
        self._listeners.append(listener)

    def unlisten(self, listener: StepListener) -> None:
        """Stop calling a listener."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def close(self) -> None:
        """End the recording: remove the hooks, drop an open step, release the model.

        Reports still work.
        """
        if self._watch is not None:
            self._watch.close()
        self.drop_step()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        self._watch = None
        self._followed.release()
        self._sampling.counts_updates = False

    # What was recorded.

    @property
    def steps(self) -> tuple[StepMemory, ...]:
        """The last 100 recorded steps, oldest first."""
        return self.history.steps

    @property
    def warm_up(self) -> StepMemory | None:
        """The last step before the first optimizer update; None if there was none."""
        return self.history.warm_up

    @property
    def steady(self) -> StepMemory | None:
        """The steady sampled step with the largest sum of its phases' peaks, or None."""
        return self.history.steady

    @property
    def largest(self) -> StepMemory | None:
        """Of all steady steps, the one with the largest peak; None if there was none."""
        return self.history.largest

    @property
    def typical(self) -> StepMemory | None:
        """The last sampled steady step with the most frequent batch size and peaks, or None.

        Of those as frequent, the one with the largest peaks. The step in which
        DistributedDataParallel rebuilds its buckets is none.
        """
        return self.history.typical

    @property
    def num_alloc_retries(self) -> int | None:
        """Retries of the allocator since the first step began; None if unknown."""
        return self.history.num_alloc_retries

    @property
    def modules(self) -> ModuleTable | None:
        """With `per_module` the last sampled steady step by module; None if there was none.

        A step with an optimizer step is preferred.
        """
        return self.history.modules

    @property
    def lifetime_peak_allocated_bytes(self) -> int | None:
        """The largest allocated bytes of the process so far; None before the first step.

        It covers the time before and between steps too: what `torch.cuda.max_memory_allocated()`
        would return without our resets.
        """
        return self.history.lifetime_peaks["allocated_bytes"]

    @property
    def lifetime_peak_reserved_bytes(self) -> int | None:
        """The same for reserved memory."""
        return self.history.lifetime_peaks["reserved_bytes"]

    @property
    def lifetime_peak_resident_bytes(self) -> int | None:
        """The same for the resident size of the process (CPU)."""
        return self.history.lifetime_peaks["resident_bytes"]

    def report(
        self,
        prediction: StepPrediction | None = None,
        *,
        device: DeviceMemory | None = None,
        capacity_bytes: int | None = None,
        headroom: float = DEFAULT_HEADROOM,
        bounds: BatchSizeBounds = DEFAULT_BOUNDS,
        notes: tuple[str, ...] = (),
    ) -> Report:
        """Compare the recorded steps with a prediction; suggest the largest batch size that fits.

        It asks the device's driver, so do not call it every step.

        Args:
            prediction: The prediction, at any batch size.
            device: The memory of the device, if it has just been read.
            capacity_bytes: The memory to suggest a batch size for, by default that of the device
                that trains.
            headroom: The fraction of the capacity that the suggestion leaves free, at least 0 and
                below 1.
            bounds: What bounds the batch size besides memory, such as the size of the dataset: a
                `BatchSizeBounds` of `memcallback.batch_size.bounds`.
            notes: More notes for the reader, one sentence each.

        Raises:
            ValueError: If `headroom` is out of range.
        """
        return self.history.report(
            self.meter.device,
            prediction,
            device=device,
            capacity_bytes=capacity_bytes,
            headroom=headroom,
            bounds=bounds,
            notes=notes,
        )

    # Steps and phases as context managers.

    @contextmanager
    def step(self, batch: object = None, *, batch_size: int | None = None) -> Iterator[None]:
        """Record one training step: one batch, with its phases inside.

        If memory runs out in it, a report is printed to stderr.

        Args:
            batch: The batch: its storages count as input, and its samples are counted.
            batch_size: Samples in the batch; by default inferred from it.

        Raises:
            RuntimeError: If a step is open already.
        """
        self.begin_step(batch, batch_size=batch_size)
        try:
            yield
        except BaseException:  # whatever ends the step, which goes on
            self.end_step(is_interrupted=True)
            raise
        self.end_step()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Record one phase inside a step. A phase may come several times in a step.

        Raises:
            RuntimeError: If no step is open.
            TypeError: If `phase` is not a `Phase`.
        """
        if not isinstance(phase, Phase):
            raise TypeError(
                f"phase must be a memcallback.Phase, got {phase!r}. Use Phase.FORWARD, "
                "Phase.BACKWARD or Phase.OPTIMIZER_STEP."
            )
        if not self.is_in_step:
            raise RuntimeError(
                f"The phase {phase.label!r} is outside a step. Put it inside "
                "`with recorder.step(batch_size=...):`."
            )
        self.open_phase(phase)
        try:
            yield
        except BaseException:  # whatever ends the phase, which goes on
            if self._open is not None:
                self._open.failed_in = phase
            raise
        finally:
            self.close_phase()

    # The same as calls, for loops with hooks at these boundaries.

    @property
    def num_updates(self) -> int:
        """Optimizer updates since the recording began."""
        return self._sampling.num_updates

    @property
    def is_in_step(self) -> bool:
        """Whether a step is open, recorded or not."""
        return self._open is not None or self._is_skipping

    @property
    def current_phase(self) -> Phase | None:
        """The open phase; None between phases, and in a provisional one (see `open_phase`)."""
        phases = self._phases
        return None if phases is None else phases.current_phase

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The models; none once the recorder is closed."""
        return tuple(self._followed.models)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers; none once the recorder is closed."""
        return tuple(self._followed.optimizers)

    @property
    def open_batch(self) -> object:
        """The batch of the open step; None if none is open."""
        return self._open.batch if self._open else None

    @property
    def _phases(self) -> PhaseSpans | None:
        """The phases of the open step; None once its reading is over."""
        return self._open.phases if self._open else None

    def begin_step(
        self, batch: object = None, *, batch_size: int | None = None, sample: bool = False
    ) -> None:
        """Begin a step.

        Args:
            batch: As for `step`.
            batch_size: As for `step`.
            sample: Whether this step will be logged. On a CPU only sampled steps are recorded
                otherwise; a step that will be logged is recorded too. Recording costs milliseconds
                there, so fewer and fewer of these steps are recorded: after the tenth update at
                most every second step, after the twentieth every third, and so on, down to one in
                50.

        Raises:
            RuntimeError: If a step is open already.
            ValueError: If the batch size is below 1.
            TypeError: If it is not a whole number.
        """
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, INFERRED)
        if self._open is not None and self._watch is not None:
            self._watch.give_up_step()
        if self._open is not None:
            raise RuntimeError(
                "A step is open already: end it first, and do not nest `with recorder.step():`."
            )
        is_logged = sample or any(listener.wants_step() for listener in self._listeners)
        reads_all = self.meter.reads_every_step
        is_sampled = self._sampling.samples_next(is_logged=is_logged and not reads_all)
        self._is_skipping = not (is_sampled or reads_all)
        forget_failure()
        forget_explained()
        if self._is_skipping:
            self._sampling.num_steps += 1
            return
        self._open = self._followed.open_step(
            batch,
            infer_batch_size(batch).batch_size if batch_size is None else batch_size,
            meter=self.meter,
            is_sampled=is_sampled,
            per_module=self._per_module,
            num_updates_before=self.num_updates,
        )
        self._open.begin()

    def open_phase(self, phase: Phase, *, is_provisional: bool = False) -> None:
        """Begin a phase; an open one ends at the same reading.

        An optimizer step right after a backward pass begins with the reading that ended it: nothing
        of interest happens between them, and a step stays at five reads.

        Args:
            phase: The phase.
            is_provisional: Whether the phase is only assumed to begin at the last reading. It is
                dropped if one of these comes before the next reading: the end of the step, another
                provisional phase, or an optimizer step.
        """
        forget_failure()
        if (phases := self._phases) is not None:
            phases.open_phase(phase, is_provisional=is_provisional)

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """End the open phase, if there is one.

        Args:
            covers: All phases inside it, if the loop does not mark where one ends and the next
                starts.
        """
        if (phases := self._phases) is not None:
            phases.close_phase(covers=covers)

    def end_reading(self) -> None:
        """Stop reading the open step: on a CPU, PyTorch's profiler is free from here on."""
        if self._open is not None:
            self.close_phase()
            self._open.end_reading()

    def drop_step(self) -> None:
        """Drop the open step, if there is one, without a record."""
        self._is_skipping = False
        if self._open is not None:
            step, self._open = self._open, None
            step.end_reading()

    def end_step(self, *, is_interrupted: bool = False) -> StepMemory | None:
        """End the step and keep its record.

        Args:
            is_interrupted: Whether an exception ended it.

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
        step.end()
        self._open = None
        sampling = self._sampling
        sampling.on_step_end(has_update=step.has_update and not is_interrupted)
        num_updates = sampling.num_updates - step.num_updates_before
        record, compute_modules = step.to_memory(
            index=sampling.num_steps - 1,
            num_updates=num_updates if sampling.counts_updates else None,
            is_interrupted=is_interrupted,
        )
        is_usual = step.num_rebuilt == num_rebuilt(self.models)
        self.history.add(record, step.stats, compute_modules, is_usual=is_usual)
        for listener in tuple(self._listeners):
            listener.on_step(record, step.batch)
        return record

    # Out of memory.

    def failed(self, error: BaseException | None) -> None:
        """Report an error of the loop if it says that memory ran out; each error once.

        Listeners print and write the report. Without any it is printed to stderr.

        Args:
            error: The error, with the frames that it went through; None for none.
        """
        if error is None or not is_new_shortage(error):
            return
        listeners = tuple(self._listeners)
        predictions = (listener.prediction for listener in listeners)
        prediction = next((known for known in predictions if known is not None), None)
        report = self.explain(error, prediction)
        if report is None:
            return
        for listener in listeners:
            listener.on_out_of_memory(report, error)
        if not listeners and sys.stderr is not None:  # `print` would take stdout
            print(report.to_text(), file=sys.stderr)

    def explain(
        self,
        error: BaseException,
        prediction: StepPrediction | None = None,
        *,
        where: str = "",
    ) -> OutOfMemoryReport | None:
        """Explain a caught out-of-memory error, while its frames still hold the tensors.

        Args:
            error: The error.
            prediction: The prediction of a training step, at any batch size; it is not used outside
                of a step.
            where: What was running outside of steps, such as `validation`.

        Returns:
            The report, which is also kept in `out_of_memory`; None if the error is another one, or,
            with a warning, if it cannot be explained.
        """
        step = self._open
        phase = (step.failed_in or self.current_phase) if step else None
        context = OomContext(
            device=self.meter.device,
            modules=self.models,
            optimizers=self.optimizers,
            batch=self.open_batch,
            batch_size=step.batch_size if step else None,
            phase=_WORDS[phase] if phase else where,
            step=self._sampling.num_steps + 1 if step else None,
            prediction=prediction if step else None,
            rank=rank_here(),
        )
        report = explain_or_warn(error, context)
        if report is not None:
            self.out_of_memory = report
        return report
