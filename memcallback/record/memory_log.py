"""MemoryLog: a Monitor for loops without a Trainer."""

from __future__ import annotations

from copy import copy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.core.errors import fail_safe, faults_as_warnings
from memcallback.core.files import place_of
from memcallback.core.step_memory import StepMemory
from memcallback.core.torch_private import tree_map_only
from memcallback.core.validation import DEFAULT_HEADROOM, described, whole_number
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.isolation.isolated import TIMEOUT_S
from memcallback.prediction.prediction import StepPrediction
from memcallback.record.monitor import Monitor
from memcallback.record.rank_exchange import num_ranks_here, rank_here
from memcallback.record.recorder import MemoryRecorder
from memcallback.record.results import HasResults, Results, results_of
from memcallback.record.settings import MonitorSettings
from memcallback.report.console import BRIEF
from memcallback.report.report import Report
from memcallback.step.training_step import TrainingStep

if TYPE_CHECKING:
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport


class MemoryLog:
    """Predicts a loop's step, logs prediction and recording to TensorBoard, and prints reports.

    Curves and pictures go to a run of their own (`memcallback.report.tags` lists the tags), whose
    steps are optimizer updates; several optimizers of one step make one. The report is printed as
    soon as a steady step (one after an optimizer update) is recorded and the prediction, if any, is
    there. One more line is printed when the log is closed, or several if something changed. In a
    job of several processes only rank zero writes and prints, including the range of the peaks over
    the ranks. Make the log after `init_process_group`.

    As a context manager it closes itself. It is closed with its recorder too.

    Args:
        recorder: The recorder, before its first step.
        step: The step of the loop, which is predicted at once. None to predict nothing.
        log_dir: The folder in which the run is made, also an fsspec address such as
            `s3://bucket/runs`; None for no run.
        log_every_n_steps: Optimizer updates from one point to the next, at least 1.
        device: The memory to suggest a batch size for: a card by name, or a size, as for
            `memcallback.predict`; by default that of the device that trains. Where a CPU trains,
            give a size, which is how much of its memory counts: for a card nothing is suggested.
        headroom: The fraction of the capacity that a suggested batch size leaves free, at least 0
            and below 1.
        warnings: Whether to warn of unhealthy memory (see `MemoryCallback`).
        wait_for_prediction: Whether the first step waits for the prediction (see `MemoryCallback`).
        isolate: As for `memcallback.predict`.
        timeout_s: As for `memcallback.predict`.
        verbose: How much is printed (see `MemoryCallback`).
        dataset_size: Samples in the training set, shared by all ranks: no more are suggested. It is
            ignored if a batch has more.

    Raises:
        ValueError: If the device is unknown or has no known size; or if a number is out of range.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> recorder = MemoryRecorder(model, optimizer)
        >>> with MemoryLog(recorder, log_dir=None) as log, recorder.watch():  # doctest: +ELLIPSIS
        ...     for _ in range(2):
        ...         model(torch.ones(32, 10)).sum().backward()
        ...         optimizer.step()
        memcallback │ Linear · batch 32 · SGD · CPU (...)
        ...
    """

    def __init__(
        self,
        recorder: MemoryRecorder,
        step: TrainingStep | None = None,
        *,
        log_dir: str | Path | None = "memcallback",
        log_every_n_steps: int = 50,
        device: str | int | torch.device | Device | None = None,
        headroom: float = DEFAULT_HEADROOM,
        warnings: bool | None = None,
        wait_for_prediction: bool = False,
        isolate: bool = True,
        timeout_s: float = TIMEOUT_S,
        verbose: int = BRIEF,
        dataset_size: int | None = None,
    ) -> None:
        if not isinstance(recorder, MemoryRecorder):
            raise TypeError(
                f"recorder must be a MemoryRecorder, got {described(recorder)}. Give "
                "MemoryRecorder(model, optimizer)."
            )
        if step is not None and not isinstance(step, TrainingStep):
            raise TypeError(
                f"step must be a TrainingStep, got {described(step)}. Give TrainingStep(model, "
                "batch, loss=..., optimizer=...)."
            )
        self._interval = whole_number(
            "log_every_n_steps", log_every_n_steps, "Leave it out for every 50th update."
        )
        settings = MonitorSettings(
            owner="MemoryLog",
            without_prediction="MemoryLog(recorder) without a step",
            target=None if device is None else resolve(device, needs_capacity=True),
            headroom=headroom,
            predict=step is not None,
            wait_for_prediction=wait_for_prediction,
            isolate=isolate,
            timeout_s=timeout_s,
            warnings=warnings,
            verbose=verbose,
        )
        self._recorder = recorder
        self._last_point = recorder.num_updates
        self._is_broken = False
        self._is_closed = False
        bounds = BatchSizeBounds(dataset_size=dataset_size, world_size=num_ranks_here())
        #: The results of the original, in a copy; None in a log that was made.
        self._copied: Results | None = None
        is_main = not rank_here()
        self._monitor = Monitor(
            recorder,
            settings,
            print_fn=self._print if is_main else lambda _: None,
            folder=None if log_dir is None else place_of(log_dir),
            is_main=is_main,
            bounds=bounds,
        )
        self._step: TrainingStep | None = None
        recorder.listen(self)
        self._begin(step)

    @staticmethod
    def _print(text: str) -> None:
        print(text)

    @fail_safe
    def _begin(self, step: TrainingStep | None) -> None:
        if step is None:
            self._monitor.begin(None, model=None)
            return
        # Kept for an out-of-memory error, with its batch on the host: a batch on the device would
        # be one more for as long as the training lasts.
        on_host = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), step.batch)
        self._step = step.varied(batch=on_host)
        assert self._monitor.at_start is not None, "with a step there is a prediction"
        (make_step,) = self._monitor.at_start.with_others(partial(copy, step))
        self._monitor.begin(make_step, model=step.model)

    def __enter__(self) -> MemoryLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is not None:
                self._fail(kind, error)
        finally:  # also after Ctrl-C in the report
            self._finish(is_interrupted=kind is not None)

    @fail_safe
    def _fail(self, kind: type[BaseException], error: BaseException | None) -> None:
        if not self._is_closed:
            note = f"The training ended with {kind.__name__}."
            self._monitor.notes = (*self._monitor.notes, note)
            with faults_as_warnings("The error that ended the training was not reported."):
                self._recorder.failed(error)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the results, and is closed: the original goes on alone."""
        state = vars(self) | {
            "_copied": results_of(self._results),
            "_recorder": copy(self._recorder),
            "_is_closed": True,
            "_step": None,
        }
        del state["_monitor"]
        return state

    @property
    def _results(self) -> HasResults:
        return self._copied or self._monitor

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction, waited for up to 30 s; None if there is none."""
        return self._results.prediction

    @property
    def report(self) -> Report | None:
        """The last report; None before the first."""
        return self._results.report

    @property
    def out_of_memory(self) -> OutOfMemoryReport | None:
        """The report on the out-of-memory error that ended the training; None if none did."""
        return self._results.out_of_memory

    @fail_safe
    def wants_step(self) -> bool:
        """For the recorder: whether to record the step that begins, for the next point."""
        return (self._recorder.num_updates + 1) % self._interval == 0

    @fail_safe
    def on_step(self, record: StepMemory, batch: object = None) -> None:
        """For the recorder: a step was recorded."""
        if record.is_interrupted:
            return
        number = self._recorder.num_updates
        is_window_complete = self._recorder.made_update(record)
        # If the step before a point was not recorded, the next one takes its place.
        is_due = (
            is_window_complete and number // self._interval > self._last_point // self._interval
        )
        if is_due:
            self._last_point = number
        self._monitor.on_step(
            record, number, is_due=is_due, is_window_complete=is_window_complete, batch=batch
        )

    @fail_safe
    def on_out_of_memory(self, report: OutOfMemoryReport, error: BaseException) -> None:
        """For the recorder: memory ran out."""
        step = self._step
        self._monitor.on_out_of_memory(report, make_step=None if step is None else lambda: step)

    def close(self) -> None:
        """Print the last report, and close the run."""
        self._finish(is_interrupted=False)

    @fail_safe
    def _finish(self, *, is_interrupted: bool) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._monitor.finish(self._recorder.num_updates, is_interrupted=is_interrupted)
            self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._step = None
        self._recorder.unlisten(self)
        self._monitor.close()
