"""MemoryCallback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memcallback.batch_size.advice import DEFAULT_HEADROOM
from memcallback.batch_size.estimate import check_headroom
from memcallback.batch_size.fitted import FittedBatchSize
from memcallback.core.errors import fail_safe, warn_and_go_on
from memcallback.core.phase_spans import (
    begin_backward,
    begin_update,
    end_backward,
    end_forward,
    end_manual_step,
    end_update,
)
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.core.validation import whole_number
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.diagnose.out_of_memory.errors import out_of_memory_in
from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport
from memcallback.integrations.lightning.fit.fit_batch_size import fit_in_place
from memcallback.integrations.lightning.fit.settings import FitSettings
from memcallback.integrations.lightning.trainer.savings import TrainerSavings
from memcallback.integrations.lightning.trainer.state import (
    is_logging_step,
    progress_of,
    say_beside,
    stage_of,
    step_number,
)
from memcallback.integrations.lightning.trainer.step import (
    LEAVES_OUT_PREDICTION,
    forecast_without,
    plan_for,
    step_of,
)
from memcallback.integrations.lightning.trainer.strategies import UnshardedModule, whole_before
from memcallback.prediction.predict_or_warn import predict_or_warn
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.record.monitor import Monitor
from memcallback.record.oom_response import AllocatorHistory
from memcallback.record.rank_exchange import RankExchange
from memcallback.record.recorder import MemoryRecorder
from memcallback.report.plots import what_if_bars
from memcallback.report.report import Report
from memcallback.report.tensorboard import WHAT_IF_IMAGE_TAG, WHAT_IF_TAG
from memcallback.report.writers import Writers
from memcallback.savings.checkpointing import CheckpointOption
from memcallback.savings.plan import Plan
from memcallback.step.batch import INFERRED, infer_batch_size, warn_of_batch
from memcallback.step.model import warn_of_devices
from memcallback.step.training_step import TrainingStep

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    # The two packages are the same code with unrelated classes, and a Trainer may refuse a callback
    # of the other one's. A program uses one of them: what it has imported. If it has imported
    # neither yet, the class is of both, as far as they are installed.
    _names = ("lightning.pytorch", "pytorch_lightning")
    _bases = [sys.modules[name].Callback for name in _names if name in sys.modules]
    for _name in () if _bases else _names:
        with suppress(
            Exception
        ):  # one of the two may be missing or broken, and the program may use the other
            _bases.append(import_module(_name).Callback)
    if not _bases:
        raise ModuleNotFoundError(
            "MemoryCallback needs Lightning: pip install lightning. MemoryRecorder works without it."
        )
    Callback = type("Callback", tuple(_bases), {})
#: Attributes of the recorder that a checkpoint carries on.
_LIFETIME_PEAKS = (
    "lifetime_peak_allocated_bytes",
    "lifetime_peak_reserved_bytes",
    "lifetime_peak_resident_bytes",
)


class MemoryCallback(Callback):
    """Records device memory in each phase of each training step, beside a prediction, and suggests
    the largest batch.

    Unless a saving is asked for, nothing of the training changes: weights, losses, random numbers,
    metrics and checkpoints are the same with and without. On CUDA a step costs five reads of the
    allocator's counters; figures are logged at the Trainer's logging interval, and what is held by
    category is counted on the steps of the first three updates and of every 50th after them. On a
    CPU only the steps of the first three updates and of the logging interval are recorded.

    Logged to every logger of the Trainer (`memcallback.tensorboard` lists the tags); without a
    logger, to a TensorBoard run under the Trainer's root directory. A report is printed once the
    first steady step is known, and at the end. In a job of several ranks each records itself; rank
    zero logs and prints for all, the range over the ranks included.

    Args:
        batch_size: Samples in a batch, if they are not to be inferred from it.
        device: The memory to plan for: that of a card by name, or a size, as for
            `memcallback.predict`; by default that of the device that trains.
        headroom: The fraction of the capacity that a suggested batch size leaves free, at least 0
            and below 1.
        predict: Whether to predict the step before it first runs.
        what_if: Whether to predict besides what each saving of memory would buy, which takes some
            twenty times as long; the plan is printed, and logged as text and picture.
        per_module: Whether to record by module too, on the steps on which what is held is counted:
            they take the host longer, others as long as ever. The modules that keep most are
            printed with the report; all are logged as text and picture, beside the predicted
            figures (see `MemoryRecorder.modules`).
        reset_peaks: Whether the allocator's peaks are reset at each boundary, so that each phase
            has a peak of its own; `torch.cuda.max_memory_allocated()` then starts anew at each
            phase, and `lifetime_peak_allocated_bytes` of the recorder has what it would have said.
        fit_batch_size: Whether to find the largest batch size that fits before training, and train
            with it (see `memcallback.fit_batch_size`). If none can be found, a warning says why,
            and training goes on with the size as it is.
        accumulate: Gradient accumulation: batches for each update, as
            `Trainer(accumulate_grad_batches=...)`; or a mapping from epochs to that number from
            then on. The batches stay as they are, so to keep the samples of an update make them
            smaller. Lightning divides the loss of a last window of fewer batches by the same
            number.
        amp: Mixed precision, `16-mixed` or `bf16-mixed`, by Lightning's own plugin; a skipped step
            is told of and counted (see `memcallback.amp`).
        checkpoint: True, or which modules are computed again in the backward pass (see
            `memcallback.checkpoint`).
        oom_snapshot: Whether the CUDA allocator records its last 20,000 events with the lines that
            made them, to be written for PyTorch's memory_viz if memory runs out. That costs time at
            each allocation.
        warnings: Whether to warn, once a fit and of each thing, of memory that grows from step to
            step (with what grows and who holds it), retries of the allocator, memory that is
            reserved and lies idle on a full device, a device that is nearly full, and other
            processes that take memory (see `memcallback.health` and `memcallback.growth` for when).
            A healthy training gets none. That costs a comparison of figures that are read anyway,
            and while they rise a look at what is alive every tenth step at most. A CPU has no such
            figures: each look takes up to seconds there, so None, the default, warns on other
            devices alone, and True on a CPU too.

    The three savings hold for a fit; afterwards Trainer and module are as they were before.

    Attributes:
        recorder: The recorder of the current or last fit; None before.
        prediction: The prediction of the current or last fit; None if there is none.
        report: The last report; None before.
        fitted: The batch size that was found for the current or last fit; None if none was.
        plan: What savings would buy, if that was asked for.
        out_of_memory: Of the out-of-memory error that ended the current or last fit; None if none
            did.

    Raises:
        ValueError: If the device is none, or one without a known size; if the headroom, the batch
            size or a saving is out of range; when a fit begins, if a saving cannot be applied.
        TypeError: If one of them is not of its kind.

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
    ) -> None:
        check_headroom(headroom)
        if batch_size is not None and fit_batch_size:
            raise ValueError(
                f"batch_size={batch_size} says how many samples a batch has, and fit_batch_size=True is to find that out. Leave one of the two out."
            )
        self._batch_size = (
            None if batch_size is None else whole_number("batch_size", batch_size, INFERRED)
        )
        self._planned = None if device is None else resolve(device, needs_capacity=True)
        self._capacity_bytes = self._planned.capacity_bytes if self._planned else None
        self._headroom = headroom
        self._predicts = predict
        self._whole: UnshardedModule | None = None
        self._tries_savings = what_if
        self._per_module = per_module
        self._reset_peaks = reset_peaks
        self._fits_batch_size = fit_batch_size
        self._records_history = oom_snapshot
        self._watches_health = warnings
        self._history: AllocatorHistory | None = None
        self.fitted: FittedBatchSize | None = None
        self._savings = TrainerSavings(accumulate, amp, checkpoint)
        self.recorder: MemoryRecorder | None = None
        self.plan: Plan | None = None
        self._restored_peaks: dict[str, int | None] = {}
        self._start_anew()

    @property
    def prediction(self) -> StepPrediction | None:
        """As in the attributes above."""
        return self._journal.prediction if self._journal else None

    @property
    def report(self) -> Report | None:
        """As in the attributes above."""
        return self._journal.report if self._journal else None

    def _start_anew(self) -> None:
        self._journal: Monitor | None = None
        self._without_savings: Prediction | None = None
        self.plan = None
        self.out_of_memory: OutOfMemoryReport | None = None
        self._sinks: Writers | None = None
        self._hooks: list[Any] = []
        self._is_broken = False
        self._is_running = False
        self._has_seen_batch = False

    # When something begins and ends.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set the Trainer's accumulation and precision, before it sets itself up."""
        if stage == "fit":
            self._savings.setup(trainer, pl_module, say_beside(pl_module))
            self._whole = whole_before(trainer, pl_module) if self._predicts else None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Checkpoint the module, which is whole now; with that find its batch size, if that is
        wanted. An earlier fit's errors are past.
        """
        self._savings.checkpoint(pl_module)
        self._is_broken = False
        if self._fits_batch_size:
            self._fit_batch_size(trainer, pl_module)

    @fail_safe
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin recording; sanity validation is over."""
        self._release()
        self._start_anew()
        device = trainer.strategy.root_device
        optimizers = [
            optimizer
            for optimizer in trainer.optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
        ]
        self.recorder = MemoryRecorder(
            pl_module,
            optimizers,
            device=device,
            # A CPU is read at the logging interval; elsewhere the split by category, which walks
            # the model, needs no such frequency.
            sample_every_n_steps=sys.maxsize if device.type == "cpu" else 50,
            reset_peaks=self._reset_peaks,
            per_module=self._per_module,
            use_profiler=not any(
                kind.__name__ == "PyTorchProfiler" for kind in type(trainer.profiler).__mro__
            ),
        )
        for name in _LIFETIME_PEAKS:
            setattr(self.recorder, name, self._restored_peaks.get(name))
        self._is_running = True
        is_manual = not pl_module.automatic_optimization
        for optimizer in optimizers:
            self._hooks.append(
                optimizer.register_step_pre_hook(
                    lambda *_: self._on_update_start(is_manual) if is_manual else None
                )
            )
            self._hooks.append(
                optimizer.register_step_post_hook(lambda *_: self._on_update_end(is_manual))
            )
        if trainer.is_global_zero:
            own = None if trainer.fast_dev_run else Path(trainer.default_root_dir) / "memcallback"
            self._sinks = Writers(trainer.loggers, own)
        self._journal = Monitor(
            self.recorder,
            self._sinks,
            say_beside(pl_module),
            planned=self._planned,
            headroom=self._headroom,
            completed=lambda report: self._completed(report, trainer.accumulate_grad_batches),
            exchange=RankExchange.of_job(),
        )
        warn_of_devices(pl_module, device)
        if self._watches_health or (self._watches_health is None and device.type != "cpu"):
            self._journal.watch_health(
                [pl_module], optimizers, progress=lambda: progress_of(trainer)
            )
        if self._records_history and device.type == "cuda":
            self._history = AllocatorHistory(device)

    @fail_safe
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step begins with its forward pass; before the first one comes the prediction."""
        if self.recorder is None or self._journal is None:
            return
        if not self._has_seen_batch:
            self._has_seen_batch = True
            warn_of_batch(batch, self._batch_size, "MemoryCallback")
            self._journal.begin(
                self._predict(trainer, pl_module, batch) if self._predicts else None
            )
            if self._tries_savings:
                self._try_savings(trainer, pl_module, batch)
        # A module can end an epoch before its step has run (on_train_batch_start returning -1).
        self.recorder.drop_step()
        self.recorder.begin_step(
            batch, batch_size=self._batch_size, sample=is_logging_step(trainer)
        )
        self.recorder.open_phase(Phase.FORWARD)

    @fail_safe
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Under automatic optimization the forward pass is over."""
        if self.recorder:
            end_forward(self.recorder)

    @fail_safe
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The backward pass begins."""
        if self.recorder:
            begin_backward(self.recorder)

    @fail_safe
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The backward pass is over; by hand, another forward pass may follow."""
        if self.recorder:
            end_backward(self.recorder, is_manual=not pl_module.automatic_optimization)

    @fail_safe
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The optimizer step begins, gradient clipping included."""
        self._on_update_start(not pl_module.automatic_optimization)

    @fail_safe
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is over, the optimizer's too if the update was skipped."""
        if self.recorder is None:
            return
        if not pl_module.automatic_optimization:
            end_manual_step(self.recorder)
        record = self.recorder.end_step()
        if record is not None:
            self._publish(trainer, pl_module, record, batch)

    @fail_safe
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """A step that did not run does not reach into validation."""
        if self.recorder:
            self.recorder.drop_step()

    @fail_safe
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last report."""
        self._finish(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training has failed: say where memory ran out, undo the savings, keep what was recorded
        of the step, and report.
        """
        if out_of_memory_in(exception, is_memory_short=True) is not None:
            with suppress(
                Exception
            ):  # of the state that a full device is in; the error itself goes on
                self._explain(trainer, pl_module, exception)
        self._on_failure(trainer, pl_module, exception)
        self._savings.undo()

    @fail_safe
    def _on_failure(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.recorder is None or not self._is_running:
            return
        record = self.recorder.end_step(is_interrupted=True)
        if record is not None and self._journal is not None:
            self._journal.notes = (
                *self._journal.notes,
                f"The last step ended with {type(exception).__name__}.",
            )
        self._finish(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the savings, and take back the hooks on the optimizers."""
        self._savings.undo()
        self._tear_down()

    @fail_safe
    def _tear_down(self) -> None:
        self._release()

    def state_dict(self) -> dict[str, Any]:
        """The peaks over the life of the training, and the state of a GradScaler of ours."""
        peaks = (
            self._restored_peaks
            if self.recorder is None
            else {name: getattr(self.recorder, name) for name in _LIFETIME_PEAKS}
        )
        amp = self._savings.state_dict()
        return {**peaks, "amp": amp} if amp else dict(peaks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's peaks and GradScaler."""
        self._restored_peaks = {name: state_dict.get(name) for name in _LIFETIME_PEAKS}
        self._savings.load_state_dict(state_dict.get("amp", {}))

    # What happens then.

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

    def _fit_batch_size(self, trainer: Any, pl_module: Any) -> None:
        self.fitted = None
        settings = FitSettings(capacity_bytes=self._capacity_bytes, headroom=self._headroom)
        try:
            self.fitted = fit_in_place(trainer, pl_module, settings, say_beside(pl_module))
        except Exception as error:  # also the step's own, which training will meet again
            warn_and_go_on(
                f"No batch size was found, and training goes on with the size as it is. {type(error).__name__}: {error}"
            )
        if self.fitted is not None:
            say_beside(pl_module)(self.fitted.to_text())

    def _predict(self, trainer: Any, pl_module: Any, batch: Any) -> StepPrediction | None:
        assert self.recorder is not None
        if self._batch_size is None and infer_batch_size(batch).batch_size is None:
            return None
        make_step, meter = self._maker_of_step(trainer, pl_module, batch), self.recorder.meter
        prediction = predict_or_warn(
            make_step,
            device=meter.device,
            device_name=meter.device_name,
            capacity_bytes=self._capacity_bytes,
            say=say_beside(pl_module),
            without=LEAVES_OUT_PREDICTION,
        )
        if isinstance(prediction, Prediction):
            self._without_savings = forecast_without(self._savings, make_step, meter.device)
        return prediction

    def _maker_of_step(
        self, trainer: Any, pl_module: Any, batch: Any
    ) -> Callable[[], TrainingStep]:
        return lambda: step_of(trainer, pl_module, batch, self._batch_size, self._whole)

    def _try_savings(self, trainer: Any, pl_module: Any, batch: Any) -> None:
        assert self.recorder is not None
        self.plan = plan_for(
            self._maker_of_step(trainer, pl_module, batch),
            device=self.recorder.meter.device,
            capacity_bytes=self._capacity_bytes,
            headroom=self._headroom,
            say=say_beside(pl_module),
        )
        if self.plan is None or self._sinks is None:
            return
        say_beside(pl_module)(self.plan.to_text())
        self._sinks.log_text(WHAT_IF_TAG, self.plan.to_markdown(), step_number(trainer))
        self._sinks.log_image(WHAT_IF_IMAGE_TAG, step_number(trainer), what_if_bars, self.plan)

    def _completed(self, report: Report, accumulate: int) -> Report:
        """A report with what the savings change, and what they save."""
        assert self.recorder is not None
        batch_size = self.recorder.steps[-1].batch_size if self.recorder.steps else None
        report = replace(
            report, notes=(*report.notes, *self._savings.notes(batch_size, accumulate))
        )
        if self._without_savings is not None and report.prediction is not None:
            with suppress(
                ValueError
            ):  # the trace may know one batch size alone, which the report's caveats say
                return replace(
                    report,
                    without_savings=self._without_savings.at(
                        report.prediction.batch_size * accumulate
                    ),
                )
        return report

    def _explain(self, trainer: Any, pl_module: Any, error: BaseException) -> None:
        """Say where memory ran out, also outside of a fit: in validation before it, in tests."""
        journal = self._journal if self._is_running else None
        if journal is None:
            recorder = MemoryRecorder(pl_module, device=trainer.strategy.root_device)
            journal = Monitor(
                recorder, None, say_beside(pl_module), planned=None, headroom=self._headroom
            )
        batch = self.recorder.open_batch if self.recorder else None
        self.out_of_memory = journal.explain(
            error,
            where=stage_of(trainer),
            folder=None if trainer.fast_dev_run else Path(trainer.default_root_dir) / "memcallback",
            rank=trainer.global_rank if trainer.world_size > 1 else None,
            make_step=self._maker_of_step(trainer, pl_module, batch),
            history=self._history,
        )

    def _publish(self, trainer: Any, pl_module: Any, record: StepMemory, batch: Any) -> None:
        assert self._journal is not None
        is_window_complete = (
            Phase.OPTIMIZER_STEP in record.phases or not pl_module.automatic_optimization
        )
        is_due = is_logging_step(trainer)
        self._journal.publish(
            record,
            step_number(trainer),
            is_due=is_due,
            is_window_complete=is_window_complete,
            batch=batch,
        )

    def _finish(self, trainer: Any) -> None:
        if self.recorder is None or self._journal is None:
            return
        self._is_running = False
        # Lightning has counted the last batch already.
        number = max(0, step_number(trainer) - 1)
        self._journal.finish(
            number, num_updates=trainer.global_step, is_short_on_purpose=trainer.fast_dev_run
        )
        self._release()

    def _release(self) -> None:
        """Leave nothing behind on the optimizers; write out what is buffered."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._history is not None:
            self._history.close()
            self._history = None
        if self.recorder is not None:
            self.recorder.close()
        if self._journal is not None:
            self._journal.close()
        self._sinks = None
