"""Monitor (was Monitor): points, reports and warnings of one training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from memcallback.core.errors import warn_and_go_on
from memcallback.core.step_memory import DeviceMemory, StepMemory, larger
from memcallback.devices.catalogue import CATALOGUE, Device
from memcallback.devices.memory import device_memory, usable_bytes
from memcallback.diagnose.health.growth import Progress
from memcallback.diagnose.health.monitor import HealthMonitor
from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport
from memcallback.prediction.predict_or_warn import PredictedSteps, predicted_modules
from memcallback.prediction.prediction import StepPrediction
from memcallback.prediction.textbook.law import TextbookPrediction
from memcallback.record.oom_response import AllocatorHistory, tell
from memcallback.record.rank_exchange import RankExchange, place_of
from memcallback.record.recorder import MemoryRecorder
from memcallback.report.plots import batch_size_curve, module_icicle, step_by_category
from memcallback.report.rank_values import RankValues, point_of
from memcallback.report.report import Report
from memcallback.report.tensorboard import (
    CURVE_IMAGE_TAG,
    MODULES_IMAGE_TAG,
    MODULES_TAG,
    REPORT_TAG,
    STEP_IMAGE_TAG,
    rank_scalars,
    scalars,
)
from memcallback.report.writers import Writers
from memcallback.step.training_step import TrainingStep


class Monitor:
    """Sets recorded steps beside a prediction, writes both to the sinks and prints reports.

    Attributes:
        prediction: The prediction; None if there is none.
        notes: What else the person should know, one sentence each.
        report: The last report; None before the first.
        out_of_memory: Of the out-of-memory error that ended the training; None if none did.
    """

    def __init__(
        self,
        recorder: MemoryRecorder,
        sinks: Writers | None,
        say: Callable[[str], None],
        *,
        planned: Device | None,
        headroom: float,
        completed: Callable[[Report], Report] | None = None,
        exchange: RankExchange | None = None,
    ) -> None:
        self.prediction: StepPrediction | None = None
        # Of a card by name which of several was taken; its architecture is nothing here.
        is_named = planned is not None and any(planned.name == card.name for card in CATALOGUE)
        self.notes: tuple[str, ...] = planned.caveats if planned and is_named else ()
        self.report: Report | None = None
        self.out_of_memory: OutOfMemoryReport | None = None
        self._recorder = recorder
        self._sinks = sinks
        self._say = say
        self._capacity_bytes = planned.capacity_bytes if planned else None
        self._headroom = headroom
        self._completed = completed
        self._exchange = exchange
        self._ranks: RankValues | None = None
        self._steady_since: int | None = None
        self._predicted_steps = PredictedSteps(None)
        self._unlogged: StepMemory | None = None
        self._health: HealthMonitor | None = None

    def begin(self, prediction: StepPrediction | None) -> None:
        """The first step is about to begin."""
        self.prediction = prediction
        self._predicted_steps = PredictedSteps(prediction)
        if self._sinks is not None:
            bands = (
                ("allocated",)
                if self._recorder.meter.device.type == "cpu"
                else ("allocated", "reserved")
            )
            rank_bands = () if self._exchange is None else bands
            self._sinks.write_layout(
                has_band=isinstance(prediction, TextbookPrediction), rank_bands=rank_bands
            )

    def watch_health(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        progress: Callable[[], Progress] = Progress,
    ) -> None:
        """Warn from here on of what is wrong with the memory of the training; the report says it
        too.
        """
        self._health = HealthMonitor(
            modules,
            optimizers,
            self._recorder.meter.device,
            headroom=self._headroom,
            progress=progress,
            suggestion=lambda: (
                self.report.advice.batch_size if self.report and self.report.advice else None
            ),
        )

    def publish(
        self,
        record: StepMemory,
        number: int,
        *,
        is_due: bool,
        is_window_complete: bool,
        batch: object = None,
    ) -> None:
        """A step was recorded: log it if that is due, and report the first steady one."""
        if self._health is not None:
            self._health.on_step(record, batch)
        if self._exchange is not None:
            had_none = self._ranks is None
            self._log_ranks(self._exchange.ready())
            if had_none and self._ranks is not None:
                self._say(self._ranks.to_text())
        self._unlogged = larger(self._unlogged, record)
        is_first_steady = self._recorder.steady is not None and self.report is None
        if not is_window_complete or not (is_due or is_first_steady):
            return
        reserved_bytes = record.windows[-1].end.reserved_bytes if record.windows else None
        device = device_memory(self._recorder.meter.device, reserved_bytes=reserved_bytes)
        self._log(device, number)
        if is_first_steady:
            self._write_report(device, number)
            self._steady_since = number
        if self._health is not None:
            self._health.on_reading(device)

    def explain(
        self,
        error: BaseException,
        *,
        folder: Path | None,
        where: str = "",
        rank: int | None = None,
        make_step: Callable[[], TrainingStep] | None = None,
        history: AllocatorHistory | None = None,
    ) -> OutOfMemoryReport | None:
        """Memory ran out: say where and of what, and work out what would have helped (see
        `rescue.tell`).
        """
        report = self._recorder.explain(error, self.prediction, where=where, rank=rank)
        if report is None:
            return None
        # Of a loop that goes on with a smaller batch again and again savings are tried once.
        is_first_in_step = report.place.step is not None and self.out_of_memory is None
        self.out_of_memory = tell(
            report,
            # What is said otherwise is rank zero's; this is the matter of the rank that failed.
            say=(lambda text: print(f"Rank {rank}: {text}", file=sys.stderr))
            if rank
            else self._say,
            folder=self._sinks.log_dir
            if folder and self._sinks and self._sinks.log_dir
            else folder,
            sinks=self._sinks,
            prediction=self.prediction if is_first_in_step else None,
            make_step=make_step,
            history=history,
        )
        return self.out_of_memory

    def finish(self, number: int, *, num_updates: int, is_short_on_purpose: bool = False) -> None:
        """Training is over: the last point and the last report."""
        if self._recorder.largest is None and self._recorder.warm_up:
            text = (
                f"Only {num_updates} optimizer update was made: gradients and optimizer state were not there before it, so no steady "
                "step was measured. Train for at least 2 steps to compare prediction and measurement."
            )
            self.notes = (*self.notes, text)
            if not is_short_on_purpose:
                warn_and_go_on(text)
        device = device_memory(self._recorder.meter.device)
        self._log(device, number)
        if self._exchange is not None:
            self._log_ranks(self._exchange.end())
            self.notes = (*self.notes, *self._notes_on_ranks(self._exchange))
        self._write_report(device, number)
        if self._sinks is not None and self._sinks.log_dir is not None:
            self._say(
                f"Memory curves: tensorboard --logdir {self._sinks.log_dir}\nthen open http://localhost:6006/#custom_scalars"
            )

    def close(self) -> None:
        """Write out what is buffered, and let go of the loop. Nothing is written afterwards."""
        if self._sinks is not None:
            self._sinks.close()
        if self._exchange is not None:
            self._exchange.close()
        self._sinks = self._completed = self._exchange = None
        self._say = lambda _: None
        if self._health is not None:
            self._health.close()

    def _log(self, device: DeviceMemory, number: int) -> None:
        step, self._unlogged = self._unlogged, None
        if step is None:
            return
        if self._sinks is not None:
            self._sinks.log_scalars(
                scalars(step, self._predicted_steps.at(step.batch_size), device), number
            )
        if self._exchange is not None:
            self._tell_ranks(self._exchange, step, device, number)

    def _tell_ranks(
        self, exchange: RankExchange, step: StepMemory, device: DeviceMemory, number: int
    ) -> None:
        meter = self._recorder.meter
        capacity_bytes = self._capacity_bytes
        if capacity_bytes is None:
            capacity_bytes = usable_bytes(
                meter.device, device.capacity_bytes, device.non_pytorch_bytes or 0
            )
        exchange.send(
            point_of(
                step,
                self._predicted_steps.at(step.batch_size),
                rank=exchange.rank,
                number=number,
                capacity_bytes=capacity_bytes,
                place=place_of(meter.device_name),
            )
        )

    def _log_ranks(self, found: Iterable[RankValues]) -> None:
        for ranks in found:
            if self._sinks is not None:
                self._sinks.log_scalars(rank_scalars(ranks), ranks.number)
            if self._steady_since is not None and ranks.number >= self._steady_since:
                self._ranks = ranks

    def _notes_on_ranks(self, exchange: RankExchange) -> list[str]:
        problem = exchange.problem
        if problem is None and self._ranks is None and self._steady_since is not None:
            problem = "no figures of theirs came"
        return (
            [f"What the other ranks took is not told: {problem}."]
            if problem and exchange.rank == 0
            else []
        )

    def _write_report(self, device: DeviceMemory, number: int) -> None:
        """Print the report, and write it and its pictures where there is a TensorBoard run."""
        notes = (*self.notes, *map(str, self._health.findings if self._health else ()))
        report = self._recorder.report(
            self.prediction,
            device=device,
            capacity_bytes=self._capacity_bytes,
            headroom=self._headroom,
            notes=notes,
        )
        report = replace(report, ranks=self._ranks)
        self.report = report = self._completed(report) if self._completed else report
        if self._sinks is None:
            return
        self._say(report.to_text())
        self._sinks.log_text(REPORT_TAG, report.to_markdown(), number)
        step, prediction, advice = report.measured, report.prediction, report.advice
        if (
            step is not None
            and step.held_bytes is not None
            and step.windows[0].start.allocated_bytes is not None
        ):
            self._sinks.log_image(STEP_IMAGE_TAG, number, step_by_category, step, prediction)
        if advice is not None:
            self._sinks.log_image(CURVE_IMAGE_TAG, number, batch_size_curve, advice, prediction)
        modules = self._recorder.modules
        if modules is not None:
            predicted = predicted_modules(self.prediction, modules.batch_size)
            self._say(modules.to_text(predicted))
            self._sinks.log_text(MODULES_TAG, modules.to_markdown(predicted), number)
            self._sinks.log_image(MODULES_IMAGE_TAG, number, module_icicle, modules, predicted)
