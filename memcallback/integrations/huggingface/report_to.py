"""destinations_here(): the integrations of a Hugging Face Trainer's `report_to`, by their classes.

The Trainer's own `log` would add our values to its `log_history` and print them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from transformers import TrainerControl

from memcallback.core.errors import faults_as_warnings
from memcallback.integrations.huggingface.frames import callbacks_here
from memcallback.report.loggers.destination import Destination, ValuesOnly
from memcallback.report.loggers.tensorboard import TensorBoardRun
from memcallback.report.loggers.tracking import CometExperiment, MlflowRun, WandbRun


def destinations_here(args: Any, state: Any) -> list[Destination]:
    """A destination for each integration of the Trainer that is calling its callbacks."""
    found = []
    for callback in callbacks_here():
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        for name, destination_of in _DESTINATIONS.items():
            if name in kinds:
                with faults_as_warnings(f"{name} gets no memory values."):
                    found.append(destination_of(callback, args, state))
                break
    return found


class _TrainersRun(TensorBoardRun):
    """The Trainer closes its writer before our last report, which opens it anew."""

    def __init__(self, callback: Any) -> None:
        super().__init__(callback.tb_writer, callback.tb_writer.log_dir, is_own=False)
        self._callback = callback

    def close(self) -> None:
        super().close()
        if self._callback.tb_writer is not self._writer:
            self._writer.close()


def _wandb(callback: Any, args: Any, state: Any) -> Destination:
    run = callback._wandb.run

    def log(values: Mapping[str, Any], step: int) -> None:
        run.log({**values, "train/global_step": step})

    return WandbRun("W&B", log)


def _mlflow(callback: Any, args: Any, state: Any) -> Destination:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    # By its number: the Trainer ends the run before our last report, and whatever is logged to the
    # active run would begin another.
    run_id = callback._ml_flow.active_run().info.run_id
    client = MlflowClient()

    def log(values: Mapping[str, Any], step: int) -> None:
        now = round(1000 * time.time())
        metrics = [Metric(tag, value, now, step) for tag, value in values.items()]
        client.log_batch(run_id, metrics)

    return MlflowRun("MLflow", log, client, run_id)


def _comet(callback: Any, args: Any, state: Any) -> Destination:
    experiment = callback._experiment

    def log(values: Mapping[str, Any], step: int) -> None:
        experiment.log_metrics(dict(values), step=step)

    return CometExperiment("Comet", log, experiment)


def _values_only(callback: Any, args: Any, state: Any) -> Destination:
    def log(values: Mapping[str, Any], step: int) -> None:
        at_step = copy(state)
        at_step.global_step = step
        callback.on_log(args, at_step, TrainerControl(), logs=dict(values))

    return ValuesOnly(type(callback).__name__, log)


_Maker = Callable[[Any, Any, Any], Destination]
#: By the class of an integration. Others count steps of their own in `on_log` (DVCLive) or take no
#: values (CodeCarbon, Flyte), so they get none.
_DESTINATIONS: Mapping[str, _Maker] = {
    "TensorBoardCallback": lambda callback, args, state: _TrainersRun(callback),
    "WandbCallback": _wandb,
    "MLflowCallback": _mlflow,
    "CometCallback": _comet,
    "AzureMLCallback": _values_only,
    "ClearMLCallback": _values_only,
    "NeptuneCallback": _values_only,
    "SwanLabCallback": _values_only,
    "TrackioCallback": _values_only,
}
