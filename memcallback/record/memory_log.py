"""MemoryLog: the Monitor for plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.utils._pytree import tree_map_only

from memcallback.batch_size.advice import DEFAULT_HEADROOM
from memcallback.batch_size.estimate import check_headroom
from memcallback.core.document import for_console
from memcallback.core.errors import fail_safe
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.core.validation import described, whole_number
from memcallback.devices.catalogue import Device
from memcallback.devices.local import resolve
from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport
from memcallback.prediction.predict_or_warn import predict_or_warn
from memcallback.prediction.prediction import StepPrediction
from memcallback.record.monitor import Monitor
from memcallback.record.rank_exchange import RankExchange
from memcallback.record.recorder import MemoryRecorder
from memcallback.report.report import Report
from memcallback.report.writers import Writers
from memcallback.step.model import warn_of_devices
from memcallback.step.training_step import TrainingStep


class MemoryLog:
    """Predicts the step of a loop, logs what a recorder records beside it to TensorBoard, and
    prints reports.

    Curves and pictures go to a run of their own (`memcallback.tensorboard` lists the tags), counted
    in optimizer updates. The report is printed once the first steady step is known, and when the
    log is closed. In a job of several processes only rank zero writes and prints, the range over
    the ranks included; make the log once the process group is there.

    As a context manager it closes itself. It is closed with its recorder too.

    Args:
        recorder: The recorder, before its first step.
        step: What a step is; it is predicted at once. None to predict nothing.
        log_dir: The folder under which the run is made; None for none.
        log_every_n_steps: Optimizer updates from one point to the next, at least 1.
        device: The memory to plan for: that of a card by name, or a size, as for
            `memcallback.predict`; by default that of the device that trains.
        headroom: The fraction of the capacity that a suggested batch size leaves free, at least 0
            and below 1.
        warnings: Whether to warn of what is wrong with the memory of the training (see
            `MemoryCallback`).

    Raises:
        ValueError: If the device is none, or one without a known size; or if a number is out of
            range.
        TypeError: If one of them is not of its kind.

    Examples:
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> recorder = MemoryRecorder(model, optimizer)
        >>> with MemoryLog(recorder, log_dir=None) as log, recorder.watch():  # doctest: +ELLIPSIS
        ...     for _ in range(2):
        ...         model(torch.ones(32, 10)).sum().backward()
        ...         optimizer.step()
        Memory of one training step (steady, batch size 32) on CPU
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
    ) -> None:
        if not isinstance(recorder, MemoryRecorder):
            raise TypeError(
                f"recorder must be a MemoryRecorder, got {described(recorder)}. Give MemoryRecorder(model, optimizer)."
            )
        if step is not None and not isinstance(step, TrainingStep):
            raise TypeError(
                f"step must be a TrainingStep, got {described(step)}. Give TrainingStep(model, batch, loss=..., optimizer=...)."
            )
        check_headroom(headroom)
        self._interval = whole_number(
            "log_every_n_steps", log_every_n_steps, "Leave it out for every 50th update."
        )
        planned = None if device is None else resolve(device, needs_capacity=True)
        self._recorder = recorder
        self._last = recorder.num_updates
        self._is_broken = False
        self._is_closed = False
        is_main = is_rank_zero()
        # With its batch on the host: on the device it would be one more for as long as the training
        # lasts.
        self._step = (
            None
            if step is None
            else step.varied(
                batch=tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), step.batch)
            )
        )
        self._folder = None if log_dir is None else Path(log_dir)
        sinks = Writers([], self._folder) if is_main else None
        say = say_here if is_main else _say_nothing
        self._journal = Monitor(
            recorder, sinks, say, planned=planned, headroom=headroom, exchange=RankExchange.of_job()
        )
        self._warns = warnings or (warnings is None and recorder.meter.device.type != "cpu")
        recorder.listen(self)
        self._begin(step, planned, say)

    @fail_safe
    def _begin(
        self, step: TrainingStep | None, planned: Device | None, say: Callable[[str], None]
    ) -> None:
        prediction = None
        if step is not None:
            device = self._recorder.meter.device
            warn_of_devices(step.model, device)
            prediction = predict_or_warn(
                lambda: step,
                device=device,
                device_name=self._recorder.meter.device_name,
                capacity_bytes=planned.capacity_bytes if planned else None,
                say=say,
                without="MemoryLog(recorder) without a step",
            )
        self._journal.begin(prediction)

    def __enter__(self) -> MemoryLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._tell(error)
            self._journal.notes = (
                *self._journal.notes,
                f"The training ended with {kind.__name__}.",
            )
        self.close()

    @fail_safe
    def _tell(self, error: BaseException | None) -> None:
        self._recorder.failed(error)

    @property
    def prediction(self) -> StepPrediction | None:
        """The prediction; None if there is none."""
        return self._journal.prediction

    @property
    def report(self) -> Report | None:
        """The last report; None before the first."""
        return self._journal.report

    @fail_safe
    def wants_step(self) -> bool:
        """As `StepListener`: the step after which a point is due."""
        return (self._recorder.num_updates + 1) % self._interval == 0

    @fail_safe
    def on_step(self, record: StepMemory) -> None:
        """As `StepListener`."""
        if record.is_interrupted:
            return
        if self._warns:
            # A watch may have been given its model after this log was made.
            self._warns = False
            self._journal.watch_health(self._recorder.models, self._recorder.optimizers)
        number = self._recorder.num_updates
        is_window_complete = Phase.OPTIMIZER_STEP in record.phases
        # Of a step that was due and not recorded the next one takes the place.
        is_due = is_window_complete and number // self._interval > self._last // self._interval
        if is_due:
            self._last = number
        self._journal.publish(record, number, is_due=is_due, is_window_complete=is_window_complete)

    @fail_safe
    def on_out_of_memory(self, error: BaseException) -> None:
        """As `StepListener`."""
        step = self._step
        make_step = None if step is None else lambda: step
        self._journal.explain(error, folder=self._folder, rank=rank_here(), make_step=make_step)

    @property
    def out_of_memory(self) -> OutOfMemoryReport | None:
        """Of the out-of-memory error that ended the training; None if none did."""
        return self._journal.out_of_memory

    def close(self) -> None:
        """Print the last report, and close the run."""
        self._finish()
        self._release()

    @fail_safe
    def _finish(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._journal.finish(self._recorder.num_updates, num_updates=self._recorder.num_updates)

    def _release(self) -> None:
        self._is_closed = True
        self._step = None
        self._recorder.unlisten(self)
        self._journal.close()


def is_rank_zero() -> bool:
    """Whether this process is the only one of its job, or the first."""
    return not rank_here()


def rank_here() -> int | None:
    """Of a job of several processes the number of this one; None for a job of one."""
    distributed = torch.distributed
    is_several = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    return distributed.get_rank() if is_several else None


def say_here(text: str) -> None:
    """Print a text in letters that the console has."""
    print(for_console(text))


def _say_nothing(text: str) -> None:
    pass
