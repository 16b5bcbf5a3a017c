"""MemoryCallback: a Monitor for Lightning's Trainer."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memcallback.core.errors import fail_safe, faults_as_warnings
from memcallback.core.phase_spans import (
    begin_backward,
    begin_update,
    end_backward,
    end_forward,
    end_manual_step,
    end_update,
)
from memcallback.core.types import Phase
from memcallback.core.validation import DEFAULT_HEADROOM
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.integrations.lightning.callback_base import Callback
from memcallback.integrations.lightning.trainer.comparison import Compared
from memcallback.integrations.lightning.trainer.predictor import StepPredictor
from memcallback.integrations.lightning.trainer.recording import (
    explain_unrecorded,
    monitor_of,
    optimizers_of,
    recorder_of,
)
from memcallback.integrations.lightning.trainer.savings import TrainerSavings
from memcallback.integrations.lightning.trainer.state import (
    is_logging_step,
    print_beside,
    stage_of,
    step_number,
)
from memcallback.integrations.lightning.trainer.step import LEAVES_OUT_PREDICTION
from memcallback.integrations.worst_moment import note_worst_moment
from memcallback.isolation.isolated import TIMEOUT_S
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.record.monitor import Monitor
from memcallback.record.oom_response import is_new_shortage
from memcallback.record.recorder import MemoryRecorder
from memcallback.record.results import HasResults, Results, results_of
from memcallback.record.settings import MonitorSettings
from memcallback.report.console import BRIEF, Console
from memcallback.report.report import Report
from memcallback.savings.checkpointing import CheckpointOption
from memcallback.savings.plan import Plan

if TYPE_CHECKING:
    from memcallback.batch_size.fitted import FittedBatchSize
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport

#: What a saving that cannot be applied to this Trainer or module raises when a fit begins.
_USER_ERRORS = (ValueError, TypeError)
_NO_SAVINGS = "Training goes on without the savings that could not be applied."


class MemoryCallback(Callback):
    """Records device memory in each phase of each training step, and compares it to a prediction.

    It also suggests the largest batch size.

    The training does not change: weights, losses, random numbers, metrics, and the model and the
    optimizers in checkpoints are the same with and without the callback, unless you turn on
    `fit_batch_size` or one of the savings `accumulate`, `amp` and `checkpoint`. The callback adds
    its own peaks to a checkpoint. On CUDA a step costs five reads of the allocator's
    counters. Values are logged at the Trainer's logging interval; the bytes in each category are
    counted on the steps of the first three updates and of every 50th after them. On a CPU only the
    steps of the first three updates, the first one of a new batch size and those that are logged
    are recorded. If the logging interval is short, fewer and fewer of the logged steps are recorded
    after the tenth update, down to one step in 50. If few were, the line at the end says how many.

    Values go to every logger of the Trainer (`memcallback.report.tags` lists the tags);
    without a logger, to a TensorBoard run under the Trainer's root directory, which may be an
    fsspec address. The report is printed as soon as a steady step (one after an optimizer update)
    is recorded and the prediction, if any, is there. One more line is printed at the end, or
    several if something changed.
    In a job of several ranks each records itself; rank zero logs and prints for all, including
    the range over the ranks. A copy of the callback, by pickle too, has its settings and results.

    Args:
        batch_size: Samples in a batch; by default inferred from it.
        device: The memory to suggest a batch size for: a card by name, or a size, as for
            `memcallback.predict`; by default that of the device that trains. Where a CPU trains,
            give a size, which is how much of its memory counts: for a card nothing is suggested.
        headroom: The fraction of the capacity that a suggested batch size leaves free, at least 0
            and below 1.
        predict: Whether to predict the step.
        what_if: Whether to predict the step with each memory saving too, which takes about twenty
            times as long; the report names the best, and the table is logged as text and picture.
        per_module: Whether to record by module too, on the steps on which the bytes in each
            category are counted. Those steps take the host longer. All modules are logged as text
            and picture, beside the predicted values (see `MemoryRecorder.modules`).
        reset_peaks: Whether the allocator's peaks are reset where a phase starts or ends, so that
            each phase has its own peak. `torch.cuda.max_memory_allocated()` then starts again at
            each phase; the recorder's `lifetime_peak_allocated_bytes` has its value without resets.
        fit_batch_size: Whether to find the largest batch size that fits before training, and train
            with it (see `memcallback.fit_batch_size`). If none is found, a warning says why, and
            training goes on with the size as it is.
        accumulate: Gradient accumulation: batches for each update, as
            `Trainer(accumulate_grad_batches=...)`; or a mapping from an epoch to the number that
            holds from that epoch on. The batch size stays the same: make it smaller to keep the
            number of samples in an update. If an epoch ends with an update of fewer batches,
            Lightning still divides their loss by the full number.
        amp: Mixed precision, `16-mixed` or `bf16-mixed`, by Lightning's own plugin; skipped steps
            are counted and reported (see `memcallback.amp`).
        checkpoint: True, or the modules to recompute in the backward pass (see
            `memcallback.checkpoint`).
        oom_snapshot: Whether the CUDA allocator records its last 20,000 events with the lines that
            caused them. If memory runs out, they are written for PyTorch's memory_viz. Costs time
            at each allocation.
        warnings: Whether to warn, once per fit and problem, of memory that grows from step to step
            (what grows and who holds it), allocator retries, fragmentation on a nearly full device,
            a nearly full device, and other processes that take memory (the rules are in
            `memcallback.diagnose.health`). A healthy training gets no warning. The checks compare
            values that are read anyway. While the allocator's counters rise, the checks also search
            live tensors, every tenth step at most.
            A CPU has no such values, and a search there can take seconds. So
            None, the default, warns on all devices but a CPU; True warns there too.
        wait_for_prediction: Whether the first step waits for the prediction. By default training
            goes on, and the prediction is there some steps later.
        isolate: Whether to predict in a child process, as `memcallback.predict` does.
        timeout_s: Seconds, above 0, after which the child is killed.
        verbose: How much is printed. 0: nothing, but Python warnings are still given. 1: a report
            of about 18 lines once a steady step is measured and the prediction is ready, and one
            line at the end, or more if something has changed since. 2: also the long tables, by
            module too, and all that was assumed.

    The savings `accumulate`, `amp` and `checkpoint` hold for one fit; afterwards Trainer and module
    are as before.

    Attributes:
        recorder: The recorder of the current or last fit; None before.
        fitted: The batch size that was found for the current or last fit; None if none was.
        plan: If `what_if` is on, the step predicted with each saving.
        validation: The prediction of a validation after the training step, from the largest
            batch of the sanity check: as long as the Trainer's if it keeps memory from batch to
            batch and has one loader, else of a step. None without a sanity check, and until the
            prediction is there. The report says whether training or validation needs more.
        out_of_memory: The report on the out-of-memory error that ended the current or last fit;
            None if none did.

    Raises:
        ValueError: If the device is unknown or has no known size; if the headroom, the batch size,
            `verbose` or a saving is out of range. Also at the start of a fit, if a saving cannot be
            applied.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> callback = MemoryCallback(device="24GiB")
        >>> callback = MemoryCallback(accumulate=4, amp="bf16-mixed", checkpoint=True)
    """

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        device: str | int | torch.device | Device | None = None,
        headroom: float = DEFAULT_HEADROOM,
        predict: bool = True,
        what_if: bool = False,
        per_module: bool = False,
        reset_peaks: bool = True,
        fit_batch_size: bool = False,
        accumulate: int | Mapping[int, int] | None = None,
        amp: str | None = None,
        checkpoint: CheckpointOption | None = None,
        oom_snapshot: bool = False,
        warnings: bool | None = None,
        wait_for_prediction: bool = False,
        isolate: bool = True,
        timeout_s: float = TIMEOUT_S,
        verbose: int = BRIEF,
    ) -> None:
        if batch_size is not None and fit_batch_size:
            raise ValueError(
                f"batch_size={batch_size} is the number of samples in a batch, and "
                "fit_batch_size=True is to find it. Leave one of the two out."
            )
        self._settings = MonitorSettings(
            owner="MemoryCallback",
            without_prediction=LEAVES_OUT_PREDICTION,
            target=None if device is None else resolve(device, needs_capacity=True),
            headroom=headroom,
            batch_size=batch_size,
            predict=predict,
            wait_for_prediction=wait_for_prediction,
            isolate=isolate,
            timeout_s=timeout_s,
            warnings=warnings,
            oom_snapshot=oom_snapshot,
            verbose=verbose,
        )
        self._per_module = per_module
        self._reset_peaks = reset_peaks
        self._fits_batch_size = fit_batch_size
        self._savings = TrainerSavings(accumulate, amp, checkpoint)
        self._predictor = StepPredictor(self._settings, tries_savings=what_if)
        self._restored_peaks: dict[str, int | None] = {}
        self.fitted: FittedBatchSize | None = None
        self.recorder: MemoryRecorder | None = None
        self._reset()

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction of the current or last fit, awaited for up to 30 s, or None."""
        return self._results.prediction

    @property
    def report(self) -> Report | None:
        """The last report; None before the first."""
        return self._results.report

    @property
    def _results(self) -> HasResults:
        return self._monitor or self._copied

    def _reset(self) -> None:
        """Forget the fit before."""
        self._monitor: Monitor | None = None
        #: The results of the original, in a copy that has not run a fit itself.
        self._copied = Results()
        self._savings.prediction_without = None
        self._predictor.forget_first_batch()
        self.plan: Plan | None = None
        self.validation: Prediction | None = None
        self.out_of_memory: OutOfMemoryReport | None = None
        self._hooks: list[Any] = []
        self._is_broken = False
        self._is_running = False
        self._has_seen_batch = False
        self._is_after_validation = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the results, and no part in the original's fit."""
        return vars(self) | {
            "_copied": results_of(self._results),
            "_savings": copy(self._savings),
            "_predictor": copy(self._predictor),
            "recorder": copy(self.recorder),
            "_monitor": None,
            "_hooks": [],
            "_is_running": False,
            "_is_broken": False,
        }

    # The beginning of a fit.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set the Trainer's accumulation and precision, before it sets itself up."""
        if stage != "fit":
            return
        with faults_as_warnings(_NO_SAVINGS, *_USER_ERRORS):
            self._savings.setup(trainer, pl_module, self._console(pl_module).say)
        with faults_as_warnings(
            "An error occurred before the fit. If the strategy shards the module, its step will "
            "not be predicted."
        ):
            self._predictor.keep_unsharded(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Checkpoint the module, which has all its layers now; find its batch size if asked."""
        with faults_as_warnings(_NO_SAVINGS, *_USER_ERRORS):
            self._savings.checkpoint(pl_module)
        self._is_broken = False  # whatever failed in an earlier fit
        self._predictor.forget_validation()
        if self._fits_batch_size:
            with faults_as_warnings("The search for a batch size has failed."):
                self._fit_batch_size(trainer, pl_module)

    def _console(self, pl_module: Any) -> Console:
        return Console(print_beside(pl_module), self._settings.verbose)

    def _fit_batch_size(self, trainer: Any, pl_module: Any) -> None:
        from memcallback.integrations.lightning.fit.fit_batch_size import fit_in_place
        from memcallback.integrations.lightning.fit.settings import FitSettings

        self.fitted = None
        settings = FitSettings(
            capacity_bytes=self._settings.capacity_bytes_on(trainer.strategy.root_device),
            headroom=self._settings.headroom,
        )
        self.fitted = fit_in_place(trainer, pl_module, settings, self._console(pl_module))

    @fail_safe
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """See the batches that the module brings to the device itself, to predict that too."""
        self._predictor.watch(trainer, pl_module)

    @fail_safe
    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """See no batches until the training begins."""
        self._predictor.end_watch()

    @fail_safe
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin recording; sanity validation is over."""
        self._release()
        self._reset()
        self.recorder = recorder_of(
            trainer, pl_module, reset_peaks=self._reset_peaks, per_module=self._per_module
        )
        self.recorder.history.load_peaks(self._restored_peaks)
        self._restored_peaks = {}  # a later fit is another training
        self._predictor.watch(trainer, pl_module)
        self._is_running = True
        is_manual = not pl_module.automatic_optimization
        for optimizer in optimizers_of(trainer):
            if is_manual:
                self._hooks.append(
                    optimizer.register_step_pre_hook(lambda *_: self._on_update_start(is_manual))
                )
            self._hooks.append(
                optimizer.register_step_post_hook(lambda *_: self._on_update_end(is_manual))
            )
        self._monitor = monitor_of(
            trainer,
            pl_module,
            self.recorder,
            self._settings,
            complete=lambda report: self._complete(report, trainer.accumulate_grad_batches),
        )

    def _complete(self, report: Report, accumulate: int) -> Report:
        assert self.recorder is not None
        batch_size = self.recorder.steps[-1].batch_size if self.recorder.steps else None
        return self._savings.complete(replace(report, plan=self.plan), batch_size, accumulate)

    def _on_predicted(
        self, trainer: Any, prediction: StepPrediction | None, results: Compared | None
    ) -> None:
        """Keep and show what was computed with the prediction; nothing if that failed."""
        if results is None:
            return
        self._savings.prediction_without, self.plan = results.without, results.plan
        self.validation = results.validation
        if self._monitor is None:
            return
        if self.validation is not None and isinstance(prediction, Prediction):
            note_worst_moment(self._monitor, prediction, self.validation)
        if self.plan is not None:
            self._monitor.publisher.plan(self.plan, step_number(trainer))

    # Phases of a step.

    @fail_safe
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step with its forward pass; predict before the first one."""
        if self.recorder is None or self._monitor is None:
            return
        if not self._has_seen_batch:
            self._has_seen_batch = True
            self._predictor.begin(
                self._monitor,
                trainer,
                pl_module,
                batch,
                device=self.recorder.meter.device,
                savings=self._savings,
                on_predicted=partial(self._on_predicted, trainer),
            )
        # A module can end an epoch before its step has run (on_train_batch_start returning -1).
        self.recorder.drop_step()
        self.recorder.begin_step(
            batch, batch_size=self._settings.batch_size, sample=is_logging_step(trainer)
        )
        self.recorder.open_phase(Phase.FORWARD)

    @fail_safe
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """End the forward pass, under automatic optimization."""
        if self.recorder:
            end_forward(self.recorder)

    @fail_safe
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Begin the backward pass."""
        if self.recorder:
            begin_backward(self.recorder)

    @fail_safe
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """End the backward pass; under manual optimization another forward pass may follow."""
        if self.recorder:
            end_backward(self.recorder, is_manual=not pl_module.automatic_optimization)

    @fail_safe
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin the optimizer step, gradient clipping included."""
        self._on_update_start(not pl_module.automatic_optimization)

    @fail_safe
    def _on_update_start(self, is_manual: bool) -> None:
        if self.recorder is not None:
            begin_update(self.recorder, is_manual=is_manual)

    @fail_safe
    def _on_update_end(self, is_manual: bool) -> None:
        if self.recorder is None:
            return
        is_in_update = self.recorder.current_phase is Phase.OPTIMIZER_STEP
        end_update(self.recorder, is_manual=is_manual)
        if is_in_update and not is_manual:
            # Before other callbacks' on_train_batch_end, in which a user's own profiler may start.
            self.recorder.end_reading()

    @fail_safe
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, and its optimizer step too if the update was skipped."""
        if self.recorder is None or self._monitor is None:
            return
        is_manual = not pl_module.automatic_optimization
        if is_manual:
            end_manual_step(self.recorder)
        record = self.recorder.end_step()
        if record is not None:
            self._monitor.on_step(
                record,
                step_number(trainer),
                is_due=is_logging_step(trainer),
                is_window_complete=is_manual or Phase.OPTIMIZER_STEP in record.phases,
                is_after_validation=self._is_after_validation,
                batch=batch,
            )
        self._is_after_validation = False

    @fail_safe
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the shapes of the sanity check's batches, from which validation is predicted."""
        if trainer.sanity_checking:
            self._predictor.see_validation(batch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that the next step begins without gradients."""
        self._is_after_validation = True

    @fail_safe
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Drop a step that did not run, so that it does not reach into validation."""
        if self.recorder:
            self.recorder.drop_step()

    # The end of a fit.

    @fail_safe
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the last report."""
        self._finish(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Explain an out-of-memory error, keep the step's records, report, and undo the savings."""
        try:
            # A full device can fail in any way; the error itself goes on.
            with faults_as_warnings("The error that ended the fit was not reported."):
                self._predictor.end_watch()
                self._explain(trainer, pl_module, exception)
        finally:  # also after Ctrl-C in the report
            self._on_failure(trainer, exception)
            self._undo_savings()

    def _explain(self, trainer: Any, pl_module: Any, error: BaseException) -> None:
        if self._is_running and self.recorder is not None and self._monitor is not None:
            if not is_new_shortage(error):
                return
            report = self.recorder.explain(error, self.prediction, where=stage_of(trainer))
            if report is not None:
                self.out_of_memory = report  # whatever becomes of the rest
                make_step = self._predictor.maker_of_failed(
                    trainer, pl_module, self.recorder.open_batch
                )
                self._monitor.on_out_of_memory(report, make_step=make_step)
                self.out_of_memory = self._monitor.out_of_memory
            return

        report = explain_unrecorded(trainer, pl_module, error, self._console(pl_module).say)
        if report is not None:
            self.out_of_memory = report

    @fail_safe
    def _on_failure(self, trainer: Any, exception: BaseException) -> None:
        if self.recorder is None or self._monitor is None or not self._is_running:
            return
        if self.recorder.end_step(is_interrupted=True) is not None:
            self._monitor.note_interruption(type(exception))
        self._finish(trainer, is_interrupted=True)

    def _finish(self, trainer: Any, *, is_interrupted: bool = False) -> None:
        if self._monitor is None:
            return
        self._is_running = False
        # Lightning has counted the last batch already.
        number = max(0, step_number(trainer) - 1)
        self._monitor.finish(
            number,
            is_short_on_purpose=bool(trainer.fast_dev_run),
            is_interrupted=is_interrupted,
        )
        self._release()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the savings, and remove the hooks on the optimizers."""
        self._undo_savings()
        self._tear_down()

    def _undo_savings(self) -> None:
        with faults_as_warnings("The savings could not be undone after the fit."):
            self._savings.undo()

    @fail_safe
    def _tear_down(self) -> None:
        self._release()

    def _release(self) -> None:
        """Remove all hooks, flush the writers, and keep nothing of the training."""
        # Lightning gives every callback these methods of the module, in each run anew.
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)
        self._predictor.end_watch()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.recorder is not None:
            self.recorder.close()
        if self._monitor is not None:
            self._monitor.close()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The peaks over the life of the training, and the state of our GradScaler."""
        state: dict[str, Any] = dict(self._restored_peaks)
        with faults_as_warnings("The checkpoint lacks the memory peaks recorded so far."):
            if self.recorder is not None:
                state = dict(self.recorder.history.peaks_to_dict())
        with faults_as_warnings("The checkpoint lacks the state of amp's GradScaler."):
            if amp := self._savings.state_dict():
                state["amp"] = amp
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the peaks and the GradScaler of a checkpoint."""
        with faults_as_warnings("The memory peaks in the checkpoint cannot be used."):
            self._restored_peaks = {
                name: None if peak is None else operator.index(peak)
                for name, peak in state_dict.items()
                if name != "amp"
            }
        with faults_as_warnings("The state of amp's GradScaler in the checkpoint cannot be used."):
            self._savings.load_state_dict(state_dict.get("amp", {}))
