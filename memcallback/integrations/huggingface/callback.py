"""MemoryTrainerCallback: a Monitor for the Trainer of Hugging Face transformers."""

from __future__ import annotations

import sys
import threading
import weakref
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.core.errors import fail_safe
from memcallback.core.files import inside, place_of
from memcallback.core.step_memory import StepMemory
from memcallback.core.validation import DEFAULT_HEADROOM
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.diagnose.health.growth import Progress
from memcallback.integrations.huggingface.frames import call_after_train, wrapped_by_trainer
from memcallback.integrations.huggingface.predictor import StepPredictor
from memcallback.integrations.huggingface.step import is_known_wrapper
from memcallback.integrations.worst_moment import note_worst_moment
from memcallback.isolation.isolated import TIMEOUT_S
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.record.monitor import Monitor
from memcallback.record.recorder import MemoryRecorder
from memcallback.record.results import HasResults, Results, results_of
from memcallback.record.sampling import sample_interval
from memcallback.record.settings import MonitorSettings
from memcallback.record.watch import Watch
from memcallback.report.console import BRIEF
from memcallback.report.report import Report
from memcallback.step.copies.compiled import has_compiled_code
from memcallback.step.copies.optimizers import unwrapped
from memcallback.step.loss import Loss

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ModuleNotFoundError(
            "MemoryTrainerCallback needs transformers and accelerate, the extra `huggingface` of "
            "this package: pip install transformers accelerate."
        ) from error

from memcallback.integrations.huggingface.report_to import destinations_here

_SEVERAL_DEVICES = (
    "The Trainer uses several devices in one process (DataParallel). The recorded memory "
    "is that of the first device, which holds the outputs of all. The prediction is for that "
    "device's own samples alone. Start one process for each device instead: torchrun "
    "--nproc-per-node=gpu train.py."
)
_COMPILED_WRAPPER = (
    "The Trainer compiles the model together with a wrapper around it. The prediction is for the "
    "model without compilation."
)


class MemoryTrainerCallback(TrainerCallback):
    """Records memory by phase in a Hugging Face Trainer's steps, and compares it to a prediction.

    It also suggests the largest batch size.

    The training itself does not change. A Trainer's callbacks learn where steps end; hooks on its
    model and optimizer mark the phases (see `MemoryRecorder.watch`). Every `logging_steps`, values
    go to the loggers that the Trainer's `report_to` names. With `report_to="none"` they go to a
    TensorBoard run in the folder `memcallback` under the Trainer's logging or output folder. The
    report is printed as soon as a steady step (one after an optimizer update) is recorded and the
    prediction, if any, is there. One more line is printed at the end, or several if something
    changed.

    Args:
        batch_size: Samples in a batch of this process; by default inferred from the model's
            inputs.
        device: The memory to suggest a batch size for: a card by name, or a size, as for
            `memcallback.predict`; by default that of the device that trains. Where a CPU trains,
            give a size, which is how much of its memory counts: for a card nothing is suggested.
        headroom: The fraction of the capacity that a suggested batch size leaves free, at least 0
            and below 1.
        predict: Whether to predict the step.
        loss: The loss as a function of the model and its inputs, for the prediction; by default the
            Trainer's `compute_loss`.
        per_module: Whether to record by module too (see `MemoryCallback`).
        warnings: Whether to warn of unhealthy memory (see `MemoryCallback`).
        reset_peaks: Whether the allocator's peaks are reset where a phase starts or ends, so that
            each phase has its own peak.
        wait_for_prediction: Whether the first step waits for the prediction (see `MemoryCallback`).
        isolate: As for `memcallback.predict`.
        timeout_s: As for `memcallback.predict`.
        verbose: How much is printed (see `MemoryCallback`).

    Attributes:
        recorder: The recorder of the current or last training; None before.
        evaluation: The prediction of the Trainer's evaluation after the training step, at
            `per_device_eval_batch_size`, with samples like those of the first training batch; None
            if the Trainer does not evaluate, and until the prediction is there. The report says
            which of the two needs more.

    Raises:
        ValueError: If the device is unknown or has no known size; if the headroom, the batch size
            or `verbose` is out of range.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> callback = MemoryTrainerCallback(device="24GiB")
    """

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        device: str | int | torch.device | Device | None = None,
        headroom: float = DEFAULT_HEADROOM,
        predict: bool = True,
        loss: Loss | None = None,
        per_module: bool = False,
        warnings: bool | None = None,
        reset_peaks: bool = True,
        wait_for_prediction: bool = False,
        isolate: bool = True,
        timeout_s: float = TIMEOUT_S,
        verbose: int = BRIEF,
    ) -> None:
        self._settings = MonitorSettings(
            owner="MemoryTrainerCallback",
            without_prediction="MemoryTrainerCallback(predict=False)",
            target=None if device is None else resolve(device, needs_capacity=True),
            headroom=headroom,
            batch_size=batch_size,
            predict=predict,
            wait_for_prediction=wait_for_prediction,
            isolate=isolate,
            timeout_s=timeout_s,
            warnings=warnings,
            verbose=verbose,
        )
        self._loss = loss
        self._per_module = per_module
        self._reset_peaks = reset_peaks
        self.recorder: MemoryRecorder | None = None
        self.evaluation: Prediction | None = None
        self._monitor: Monitor | None = None
        #: The results of the original, in a copy that has not run a training itself.
        self._copied = Results()
        self._watch: Watch | None = None
        #: Calls `_train_ends` after `Trainer.train`, which tells no callback of an error.
        self._end: weakref.finalize[..., Any] | None = None
        self._state: Any = None
        self._predictor: StepPredictor | None = None
        self._is_broken = False

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction of the current or last training, awaited for up to 30 s, or None."""
        return self._results.prediction

    @property
    def report(self) -> Report | None:
        """The last report; None before the first."""
        return self._results.report

    @property
    def out_of_memory(self) -> OutOfMemoryReport | None:
        """The report on the out-of-memory error that ended this or the last training, or None."""
        return self._results.out_of_memory

    @property
    def _results(self) -> HasResults:
        return self._monitor or self._copied

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the results, and no part in the original's training."""
        return vars(self) | {
            "_copied": results_of(self._results),
            "recorder": copy(self.recorder),
            "_monitor": None,
            "_watch": None,
            "_end": None,
            "_state": None,
            "_predictor": None,
            "_is_broken": False,
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin recording."""
        self._is_broken = False  # whatever failed in an earlier training
        self._begin(args, state, **kwargs)

    @fail_safe
    def _begin(
        self,
        args: Any,
        state: Any,
        *,
        model: torch.nn.Module,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **_: object,
    ) -> None:
        self._release()
        self._state, self.evaluation = state, None
        optimizer = unwrapped(optimizer)
        # The optimizers of DeepSpeed are none of PyTorch's.
        own = optimizer if hasattr(optimizer, "_optimizer_step_post_hooks") else None
        wrapped = wrapped_by_trainer(model)
        # `torch_compile=True`: the model's own hooks would be compiled, and not run.
        called = wrapped if has_compiled_code(wrapped) else model
        # Other wrappers are not part of the step that is predicted.
        trained = wrapped if is_known_wrapper(wrapped, model) else model
        recorder = self.recorder = MemoryRecorder(
            called,
            own,
            device=args.device,
            sample_every_n_steps=sample_interval(args.device),
            reset_peaks=self._reset_peaks,
        )
        self._monitor = Monitor(
            recorder,
            self._settings,
            print_fn=self._print,
            folder=inside(
                place_of(getattr(args, "logging_dir", None) or args.output_dir), "memcallback"
            ),
            is_main=state.is_world_process_zero,
            loggers=destinations_here(args, state) if state.is_world_process_zero else (),
            progress=lambda: self._progress(args.gradient_accumulation_steps),
            bounds=BatchSizeBounds.of_loader(train_dataloader, args.world_size),
        )
        if args.n_gpu > 1:
            self._monitor.notes = (*self._monitor.notes, _SEVERAL_DEVICES)
        if self._settings.predict and called is not model and trained is model:
            self._monitor.notes = (*self._monitor.notes, _COMPILED_WRAPPER)
        self._predictor = StepPredictor(
            self._settings,
            args,
            state,
            trained=trained,
            evaluated=model,  # a Trainer evaluates the model as it is
            optimizer=own,
            loader=train_dataloader,
            loss=self._loss,
        )
        recorder.listen(self)
        self._watch = recorder.watch(
            batch_size=self._settings.batch_size,
            per_module=self._per_module,
            on_first_call=lambda _, inputs: self._on_first_call(inputs),
        )
        if (end := call_after_train(self._train_ends)) is not None:
            self._end, self._watch.is_over = end

    @fail_safe
    def _on_first_call(self, inputs: dict[str, Any]) -> None:
        assert self._monitor is not None
        assert self._predictor is not None
        self._predictor.begin(self._monitor, inputs, self._on_predicted)

    def _on_predicted(self, prediction: StepPrediction | None, evaluation: Any) -> None:
        """Say in the report which part of the run needs most; warn if evaluation does not fit."""
        self.evaluation = evaluation
        monitor = self._monitor
        if monitor is None or evaluation is None or not isinstance(prediction, Prediction):
            return
        note_worst_moment(monitor, prediction, evaluation, "evaluation")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note which update comes."""
        self._state = state

    @fail_safe
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step without an update."""
        if self._watch is not None:
            self._watch.end_step()

    @fail_safe
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step, even if its update was skipped."""
        if self._watch is not None:
            self._watch.end_step()

    @fail_safe
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last report."""
        self._finish(state)

    @fail_safe
    def _train_ends(self, thread: int) -> None:
        """Let go of a model whose training a thread has left by an error.

        No more than that: it can come at any time, and in any thread that collects garbage.
        """
        if self._watch is not None:
            self._watch.remove_hooks()
        if self.recorder is not None and threading.get_ident() == thread:
            self.recorder.drop_step()

    @fail_safe
    def wants_step(self) -> bool:
        """As `StepListener`: steps of the logging interval."""
        return self._is_logging_step()

    @fail_safe
    def on_step(self, record: StepMemory, batch: object = None) -> None:
        """As `StepListener`."""
        assert self._monitor is not None
        assert self.recorder is not None
        if record.is_interrupted:
            # A Trainer has no hook for exceptions.
            self._monitor.note_interruption(sys.exc_info()[0])
            self._finish(self._state, is_interrupted=True)
            return
        self._monitor.on_step(
            record,
            self._state.global_step + 1,
            is_due=self._is_logging_step(),
            is_window_complete=self.recorder.made_update(record),
            batch=batch,
        )

    @fail_safe
    def on_out_of_memory(self, report: OutOfMemoryReport, error: BaseException) -> None:
        """As `StepListener`."""
        if self._monitor is not None:
            predictor = self._predictor
            make_step = None if predictor is None else predictor.maker_of_failed(error)
            self._monitor.on_out_of_memory(report, make_step=make_step)

    def close(self) -> None:
        """As `StepListener`."""

    def _progress(self, accumulate: int) -> Progress:
        """The progress in batches, each of which is a recorded step."""
        updates_left = max(0, self._state.max_steps - self._state.global_step)
        return Progress(epoch=int(self._state.epoch or 0), steps_left=updates_left * accumulate)

    def _is_logging_step(self) -> bool:
        interval = int(self._state.logging_steps or 0)
        return interval > 0 and (self._state.global_step + 1) % interval == 0

    def _print(self, text: str) -> None:
        if self._state.is_world_process_zero:
            print(text)

    def _finish(self, state: Any, *, is_interrupted: bool = False) -> None:
        if self._monitor is not None and self._watch is not None:
            self._watch.close()
            self._monitor.finish(state.global_step, is_interrupted=is_interrupted)
            self._release()

    def _release(self) -> None:
        """Remove all hooks on model and optimizer, and flush the writers."""
        self._watch = self._predictor = None
        if self._end is not None:
            self._end.detach()
        if self.recorder is not None:
            self.recorder.close()
        if self._monitor is not None:
            self._monitor.close()
