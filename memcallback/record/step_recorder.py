"""StepRecorder: records steps from the marks of a loop: steps, phases, and what ended them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from memcallback.core.errors import faults_as_warnings
from memcallback.core.phase_spans import PhaseSpans
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.core.validation import whole_number
from memcallback.devices.meters import Meter
from memcallback.diagnose.out_of_memory.context import PHASE_WORDS, OomContext
from memcallback.diagnose.out_of_memory.observer import forget_failure, record_failures
from memcallback.prediction.prediction import StepPrediction
from memcallback.record.oom_response import explain_or_warn, forget_explained, is_new_shortage
from memcallback.record.open_step import Followed, OpenStep, num_rebuilt
from memcallback.record.rank_exchange import rank_here
from memcallback.record.recording import Recording
from memcallback.record.sampling import Sampling
from memcallback.record.step_listener import StepListener
from memcallback.step.batch import INFERRED, infer_batch_size

if TYPE_CHECKING:
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport

_NOT_RECORDED = "A step is not recorded."


class StepRecorder:
    """What a loop, or a `Watch` for it, calls; users make a `MemoryRecorder`, which is one."""

    def __init__(
        self, followed: Followed, sampling: Sampling, meter: Meter, *, per_module: bool
    ) -> None:
        self.meter = meter
        self.history = Recording()
        record_failures()
        self.out_of_memory: OutOfMemoryReport | None = None
        self._followed = followed
        self._sampling = sampling
        self._per_module = per_module
        self._open: OpenStep | None = None
        #: The phases of the open step, if it is not recorded.
        self._skipped: set[Phase] | None = None
        self._listeners: list[StepListener] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy has what was recorded, as a closed recorder: it follows no model."""
        sampling = replace(self._sampling, counts_updates=False)
        return vars(self) | {
            "history": copy(self.history),
            "_sampling": sampling,
            "_followed": Followed(sampling),
            "_open": None,
            "_skipped": None,
            "_listeners": [],
        }

    def listen(self, listener: StepListener) -> None:
        """Call a listener at every step from now on, until the recorder is closed."""
        self._listeners.append(listener)

    def unlisten(self, listener: StepListener) -> None:
        """Stop calling a listener."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def close(self) -> None:
        """End the recording: drop an open step, release the model."""
        self.drop_step()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        self._followed.release()

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
            ValueError: If the batch size is below 1.
            TypeError: If it is not a whole number.
        """
        batch_size = self._free_for(batch_size)
        try:
            with self._skipping_on_fault():
                self.begin_step(batch, batch_size=batch_size)
            yield
        except BaseException:  # whatever ends the step, which goes on
            with faults_as_warnings(_NOT_RECORDED):
                self.end_step(is_interrupted=True)
            raise
        with faults_as_warnings(_NOT_RECORDED):
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
        try:
            with self._skipping_on_fault():
                self.open_phase(phase)
            yield
        except BaseException:  # whatever ends the phase, which goes on
            if self._open is not None:
                self._open.failed_in = phase
            raise
        finally:
            with self._skipping_on_fault():
                self.close_phase()

    @contextmanager
    def _skipping_on_fault(self) -> Iterator[None]:
        """After an error of ours skip the rest of the step, with a warning; the loop goes on."""
        with faults_as_warnings(_NOT_RECORDED):
            try:
                yield
            except BaseException:
                self.drop_step()
                self._skipped = set()
                raise

    # The same as calls, for loops with hooks at these boundaries.

    @property
    def num_updates(self) -> int:
        """Steps with an optimizer update since the recording began."""
        return self._sampling.num_updates

    def made_update(self, record: StepMemory) -> bool:
        """Whether a recorded step made an update, as far as that can be seen."""
        return not record.is_interrupted and self._is_update(record.phases)

    def _is_update(self, phases: Iterable[Phase]) -> bool:
        last = (Phase.BACKWARD,) if self._sampling.counts_backward else ()
        return any(phase in (Phase.OPTIMIZER_STEP, *last) for phase in phases)

    @property
    def is_in_step(self) -> bool:
        """Whether a step is open, recorded or not."""
        return self._open is not None or self._skipped is not None

    @property
    def current_phase(self) -> Phase | None:
        """The open phase; None between phases, and in a provisional one (see `open_phase`)."""
        return self._phases.current_phase if self._phases else None

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
        self,
        batch: object = None,
        *,
        batch_size: int | None = None,
        sample: bool = False,
        called: torch.nn.Module | None = None,
    ) -> None:
        """Begin a step.

        Args:
            batch: As for `step`.
            batch_size: As for `step`.
            sample: Whether this step will be logged. On a CPU only sampled steps are recorded, the
                first one of a new batch size (of ten at most), and logged ones. Recording costs
                milliseconds there, so fewer and fewer of these are: after the tenth update at most
                every second, after the twentieth every third, and so on, down to one in 50.
            called: The model whose call has begun, if the step begins inside of it.

        Raises:
            RuntimeError: If a step is open already.
            ValueError: If the batch size is below 1.
            TypeError: If it is not a whole number.
        """
        batch_size = self._free_for(batch_size) or infer_batch_size(batch).batch_size
        reads_all = self.meter.reads_every_step
        is_sampled = self._sampling.begin_step(
            reads_all=reads_all,
            is_logged=sample or any(listener.wants_step() for listener in self._listeners),
            batch_size=batch_size,
        )
        self._skipped = None if is_sampled or reads_all else set()
        forget_failure()
        forget_explained()
        if self._skipped is not None:
            return
        self._open = self._followed.open_step(
            batch,
            batch_size,
            meter=self.meter,
            is_sampled=is_sampled,
            per_module=self._per_module,
            num_updates_before=self._sampling.num_optimizer_updates,
        )
        self._open.begin(called)

    def _free_for(self, batch_size: int | None) -> int | None:
        """Check that a step with this batch size can begin; the size as an int."""
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, INFERRED)
        if self._open is not None:
            self._give_way()
        if self._open is not None:
            raise RuntimeError(
                "A step is open already: end it first, and do not nest `with recorder.step():`."
            )
        return batch_size

    def _give_way(self) -> None:
        """End the open step for the next one, unless the loop itself has begun it."""

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
        if self._skipped is not None and not is_provisional:
            self._skipped.add(phase)
        if (phases := self._phases) is not None:
            phases.open_phase(phase, is_provisional=is_provisional)

    def close_phase(self, *, covers: tuple[Phase, ...] = ()) -> None:
        """End the open phase, if there is one.

        Args:
            covers: All phases inside it, if the loop does not mark where one ends and the next
                starts.
        """
        if self._skipped is not None:
            self._skipped.update(covers)
        if (phases := self._phases) is not None:
            phases.close_phase(covers=covers)

    def end_reading(self) -> None:
        """Stop reading the open step: on a CPU, PyTorch's profiler is free from here on."""
        if self._open is not None:
            self.close_phase()
            self._open.end_reading()

    def drop_step(self) -> None:
        """Drop the open step, if there is one, without a record."""
        self._skipped = None
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
        try:
            if is_interrupted:
                with faults_as_warnings("The error that ended the step was not reported."):
                    self.failed(sys.exc_info()[1])
        finally:  # also after Ctrl-C in the report
            record = self._end_step(is_interrupted)
        return record

    def _end_step(self, is_interrupted: bool) -> StepMemory | None:
        """End the step, whatever ended it, and keep its record."""
        skipped, self._skipped = self._skipped, None
        step, self._open = self._open, None
        sampling = self._sampling
        if skipped is not None:
            sampling.on_step_end(has_update=not is_interrupted and self._is_update(skipped))
        if step is None:
            return None
        step.end()
        num_updates = sampling.num_optimizer_updates - step.num_updates_before
        record, compute_modules = step.to_memory(
            index=sampling.num_steps,
            num_updates=num_updates if sampling.counts_updates else None,
            is_interrupted=is_interrupted,
        )
        sampling.on_step_end(has_update=self.made_update(record))
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
            phase=PHASE_WORDS[phase] if phase else where,
            step=self._sampling.num_steps + 1 if step else None,
            prediction=prediction if step else None,
            rank=rank_here(),
        )
        report = explain_or_warn(error, context)
        if report is not None:
            self.out_of_memory = report
        return report
