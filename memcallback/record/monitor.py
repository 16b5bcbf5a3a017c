"""Monitor: predicts, logs and reports one training, whatever its loop; shared by all callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from memcallback.batch_size.bounds import DEFAULT_BOUNDS, BatchSizeBounds
from memcallback.core.errors import warn_and_go_on
from memcallback.core.interruptions import raise_if_meant
from memcallback.core.step_memory import DeviceMemory, StepMemory
from memcallback.devices.memory import device_memory
from memcallback.diagnose.health.growth import Progress
from memcallback.prediction.predict_or_warn import (
    PredictedSteps,
    begun_with,
    device_or_error,
    predict_or_warn,
    predicted_modules,
)
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.record.allocator_at_start import AllocatorAtStart
from memcallback.record.oom_response import record_history, respond
from memcallback.record.pending import PATIENCE_S, PendingPrediction
from memcallback.record.point_log import PointLog
from memcallback.record.publisher import Modules, Publisher, setup_of
from memcallback.record.rank_log import RankLog
from memcallback.record.recorder import MemoryRecorder
from memcallback.record.settings import MonitorSettings
from memcallback.report.closing import Ending
from memcallback.report.console import BRIEF, FULL, Console
from memcallback.report.history import PeakHistory
from memcallback.report.report import Report, Setup
from memcallback.report.writers import Writers
from memcallback.step.batch import infer_batch_size, warn_of_batch
from memcallback.step.holdings import written_storages
from memcallback.step.model import warn_of_devices
from memcallback.step.training_step import TrainingStep

if TYPE_CHECKING:
    from memcallback.diagnose.health.monitor import HealthMonitor
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport

#: What `Monitor.begin` may be given to compute: `more(prediction, say)`.
More = Callable[[StepPrediction | None, Callable[[str], None]], Any]
#: What is called when a prediction is there, with it and with what `more` returned.
OnPredicted = Callable[[StepPrediction | None, Any], None]
_NOT_DONE = (
    "The prediction was not done when the training ended. wait_for_prediction=True makes the "
    "first step wait for it."
)


class Monitor:
    """Compares recorded steps with a prediction, logs both and prints reports.

    The callbacks translate their loop's hooks: `begin` before the first step, `on_step` after each
    recorded one, `on_out_of_memory`, `finish` at the end of the training, and `close`.

    Attributes:
        notes: More notes for the report, one sentence each.
        report: The last report; None before the first.
        out_of_memory: The report on the out-of-memory error that ended the training; None if none
            did.
        capacity_bytes: The memory to suggest a batch size for; None for that of the device that
            trains.
        at_start: What the allocator has as the training begins; None where nothing is predicted,
            and once the prediction has begun.
        publisher: What prints and logs; the callbacks use it for what is theirs alone.
    """

    def __init__(
        self,
        recorder: MemoryRecorder,
        settings: MonitorSettings,
        *,
        print_fn: Callable[[str], None],
        folder: str | None,
        is_main: bool,
        loggers: Sequence[Any] = (),
        progress: Callable[[], Progress] = Progress,
        bounds: BatchSizeBounds = DEFAULT_BOUNDS,
        complete: Callable[[Report], Report] = lambda report: report,
    ) -> None:
        device = recorder.meter.device
        self.notes: tuple[str, ...] = settings.notes_on(device)
        self.report: Report | None = None
        self.out_of_memory: OutOfMemoryReport | None = None
        self.publisher = Publisher(
            Console(print_fn, settings.verbose), Writers(list(loggers), folder) if is_main else None
        )
        self._recorder = recorder
        self._settings = settings
        self._setup = Setup()
        #: Whether somebody waits for the prediction, and is told how far it is.
        self._is_waited_for = settings.wait_for_prediction or not settings.isolate
        self._folder = folder
        self._progress = progress
        self._bounds = bounds
        self._complete = complete
        self._ranks = RankLog(self.publisher)
        self.capacity_bytes = settings.capacity_bytes_on(device)
        self._points = PointLog(
            recorder, self.publisher, self._ranks, capacity_bytes=self.capacity_bytes
        )
        self._prediction: StepPrediction | None = None
        #: The prediction that is being made, and what to do when it is there.
        self._pending: PendingPrediction | None = None
        self._patience_s = PATIENCE_S
        self._on_predicted: OnPredicted | None = None
        self._peaks = PeakHistory()
        #: Updates whose step was read before the first report.
        self._num_read_first = 0
        self.at_start = AllocatorAtStart(recorder) if settings.predict else None
        self._history = record_history(device) if settings.oom_snapshot else None
        self._warns = settings.warnings or (settings.warnings is None and device.type != "cpu")
        self._health: HealthMonitor | None = None

    def begin(
        self,
        make_step: Callable[[], TrainingStep] | None,
        *,
        model: torch.nn.Module | None,
        batch: object = None,
        more: More | None = None,
        on_predicted: OnPredicted | None = None,
        make_simpler: Callable[[], TrainingStep] | None = None,
    ) -> None:
        """Begin to predict the first step, which is about to begin.

        `make_simpler` makes the step that is traced if the other one cannot be.

        `more(prediction, say)` computes what else is to be known, in the same child; when both are
        here, `on_predicted` is called with them.
        """
        # Without `make_step` nothing is predicted; a batch that `make_step` checks is not given.
        meter, settings = self._recorder.meter, self._settings
        at_start, self.at_start = self.at_start, None
        self._setup = self._setup_of(None)
        if model is not None:
            warn_of_devices(model, meter.device)
        if batch is not None:
            warn_of_batch(batch, settings.batch_size, settings.owner)
            if settings.batch_size is None and infer_batch_size(batch).batch_size is None:
                make_step = None
        if make_step is None or not (settings.predict or more):
            return
        try:
            step = make_step()
            self._setup = self._setup_of(step)
            self._recorder.count_beside(step.beside().values())
            batch = step.batch
        except Exception as error:  # such a step is warned of where it is predicted
            raise_if_meant(error)
        device, device_name = device_or_error(meter.device), meter.device_name
        make, segments = make_step, at_start.segments(batch) if at_start else ()

        def work(say: Callable[[str], None]) -> tuple[StepPrediction | None, Any]:
            prediction = None
            if settings.predict:
                prediction = predict_or_warn(
                    make,
                    device=device,
                    device_name=device_name,
                    capacity_bytes=self.capacity_bytes,
                    say=say,
                    without=settings.without_prediction,
                    make_simpler=make_simpler,
                )
                if isinstance(prediction, Prediction):
                    prediction = begun_with(prediction, segments)
            return prediction, None if more is None else more(prediction, say)

        self._on_predicted = on_predicted
        self._pending = PendingPrediction(
            work,
            say=self._say_progress,
            without=settings.without_prediction,
            isolate=settings.isolate,
            timeout_s=settings.timeout_s,
            is_background=not settings.wait_for_prediction,
            # A trace computes with copies that have no data.
            unread=None
            if settings.wait_for_prediction
            else written_storages(self._recorder.models, self._recorder.optimizers),
        )
        self._points.predicted = None
        self._patience_s = PATIENCE_S
        self._await_prediction(None if settings.wait_for_prediction else 0)

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction, if need be awaited for up to 30 s; None if there is none."""
        start = monotonic()
        self._is_waited_for = True
        self._await_prediction(self._patience_s)
        # Whoever waits next has the rest of it.
        self._patience_s = max(0.0, self._patience_s - (monotonic() - start))
        return self._prediction

    @property
    def known_prediction(self) -> StepPrediction | None:
        """The prediction; None as long as it is being made."""
        return self._prediction

    def _await_prediction(self, seconds: float | None) -> bool:
        """Wait so long for the prediction, if one is being made; return whether none is."""
        pending = self._pending
        if pending is None:
            return True
        if not pending.wait(seconds):
            return False
        self._pending = None
        self._prediction = pending.prediction
        self._points.predicted = PredictedSteps(pending.prediction)
        if self._on_predicted is not None:
            self._on_predicted(pending.prediction, pending.more)
        self._points.flush()
        return True

    def _say_progress(self, text: str) -> None:
        """Say how far the prediction is: to somebody who waits for it, else if all is asked for."""
        self.publisher.say(text, level=BRIEF if self._is_waited_for else FULL)

    def _setup_of(self, step: TrainingStep | None) -> Setup:
        target = self._settings.target_on(self._recorder.meter.device)
        models, optimizers = self._recorder.models, self._recorder.optimizers
        return setup_of(models, optimizers, step, target=target)

    def on_step(
        self,
        record: StepMemory,
        number: int,
        *,
        is_due: bool,
        is_window_complete: bool,
        is_after_validation: bool = False,
        batch: object = None,
    ) -> None:
        """Check the health of a recorded step; log it if due; report the first steady one."""
        self._check_health(record, batch)
        self._ranks.receive()
        self._points.add(record, number, is_after_validation=is_after_validation)
        self._peaks.add(record, number)
        is_predicted = self._await_prediction(0)
        recorder = self._recorder
        is_steady = is_predicted and recorder.steady is not None
        is_first_steady = is_steady and self._ranks.steady_since is None
        is_point = is_due or is_first_steady
        is_reported = is_predicted and recorder.typical is not None and self.report is None
        if not is_window_complete or not (is_point or is_reported):
            return
        reserved_bytes = record.windows[-1].end.reserved_bytes if record.windows else None
        device = device_memory(recorder.meter.device, reserved_bytes=reserved_bytes)
        if is_point:
            self._points.log(device)
        if is_first_steady:
            self._ranks.steady_since = number
        if is_reported:
            self._num_read_first = recorder.num_read
            self.publisher.first(self._make_report(device), self._modules(), number)
        if self._health is not None:
            self._health.on_reading(device)

    def _check_health(self, record: StepMemory, batch: object) -> None:
        if not self._warns:
            return
        if self._health is None:
            # Not earlier: a watch may get its model after a log was made.
            from memcallback.diagnose.health.monitor import HealthMonitor

            self._health = HealthMonitor(
                self._recorder.models,
                self._recorder.optimizers,
                self._recorder.meter.device,
                headroom=self._settings.headroom,
                progress=self._progress,
                suggestion=lambda: (
                    self.report.advice.batch_size if self.report and self.report.advice else None
                ),
            )
        self._health.on_step(record, batch)

    def on_out_of_memory(
        self, report: OutOfMemoryReport, *, make_step: Callable[[], TrainingStep] | None = None
    ) -> None:
        """Print, write and log a report on an out-of-memory error, with savings for the first."""
        folder, writers = self._folder, self.publisher.writers
        if folder is not None and writers is not None:
            folder = writers.make_folder() or folder
        # A loop may retry with smaller batches again and again; we try savings once.
        is_first_in_step = report.place.step is not None and self.out_of_memory is None
        self.out_of_memory = report  # whatever becomes of the rest
        self.out_of_memory = respond(
            report,
            print_fn=partial(self.publisher.say_of_rank, report.rank),
            folder=folder,
            writers=writers,
            prediction=self.prediction if is_first_in_step else None,
            isolate=self._settings.isolate,
            timeout_s=self._settings.timeout_s,
            make_step=make_step,
            history=self._history,
        )

    def note_interruption(self, kind: type[BaseException] | None) -> None:
        """Say in the last report which exception ended the last step."""
        name = kind.__name__ if kind else "an exception"
        self.notes = (*self.notes, f"The last step ended with {name}.")

    def finish(
        self, number: int, *, is_short_on_purpose: bool = False, is_interrupted: bool = False
    ) -> None:
        """Log the last point and write the last report; if interrupted, wait for nothing."""
        recorder = self._recorder
        if recorder.largest is None and recorder.warm_up:
            count = recorder.num_updates
            text = (
                f"{f'Only {count}' if count else 'No'} optimizer "
                f"{'updates were' if count > 1 else 'update was'} made. "
                "The optimizer's state exists only after the first update. A steady step begins "
                "after it, and none was measured. Train for at least 2 updates of each optimizer "
                "to compare prediction and measurement."
            )
            self.notes = (*self.notes, text)
            if not is_short_on_purpose:
                warn_and_go_on(text)
        patience_s = 0 if is_interrupted else self._patience_s
        if not self._await_prediction(patience_s) and self._pending is not None:
            self._pending.close()
            self._pending = None
            self._points.predicted = PredictedSteps(None)
            self.notes = (*self.notes, _NOT_DONE)
        self._points.flush()
        device = device_memory(recorder.meter.device)
        self._points.log(device)
        self.notes = (*self.notes, *self._ranks.end())
        ending = Ending(
            num_steps=recorder.num_updates,
            num_read=recorder.num_read,
            num_read_since=recorder.num_read - self._num_read_first,
            largest=recorder.largest,
            num_alloc_retries=recorder.num_alloc_retries,
        )
        self.publisher.last(
            self._make_report(device),
            self._modules(),
            number,
            ending,
            peaks=None if is_interrupted else self._peaks,
            warnings=self._warnings(),
        )

    def close(self) -> None:
        """Flush the writers and release the loop. Nothing is written or printed afterwards."""
        self.at_start = None
        if self._pending is not None:
            self._pending.close()
            self._pending = None
        if self._history is not None:
            self._history.close()
        self.publisher.close()
        self._ranks.close()
        if self._health is not None:
            self._health.close()
        self._history = self._on_predicted = None
        self._complete, self._progress = (lambda report: report), Progress
        self._warns = False

    def _modules(self) -> Modules:
        measured = self._recorder.modules
        if measured is None:
            return None, None
        return measured, predicted_modules(self._prediction, measured.batch_size)

    def _warnings(self) -> tuple[str, ...]:
        return tuple(map(str, self._health.findings)) if self._health else ()

    def _make_report(self, device: DeviceMemory) -> Report:
        report = self._recorder.report(
            self._prediction,
            device=device,
            capacity_bytes=self.capacity_bytes,
            headroom=self._settings.headroom,
            bounds=self._bounds,
            notes=(*self.notes, *self._warnings()),
        )
        if not self._setup.model:  # a recorder may get its model after a log was made
            self._setup = self._setup_of(None)
        if self._settings.is_unanswerable(self._recorder.meter.device):
            report = replace(report, advice=None)
        report = replace(report, ranks=self._ranks.steady, setup=self._setup)
        self.report = report = self._complete(report)
        return report
