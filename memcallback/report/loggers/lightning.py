"""destination_of(): what a Lightning logger takes, by its class."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from memcallback.report.loggers.destination import Destination, LogMetrics, ValuesOnly
from memcallback.report.loggers.tensorboard import TensorBoardRun
from memcallback.report.loggers.tracking import CometExperiment, MlflowRun, WandbRun


def destination_of(logger: Any) -> Destination:
    """The destination for a logger of either Lightning package, unless it is one already."""
    if isinstance(logger, Destination):
        return logger
    kinds = {kind.__name__ for kind in type(logger).__mro__}
    name = type(logger).__name__
    experiment = getattr(logger, "experiment", None)
    # Whoever has a writer has imported it; others may not have TensorBoard.
    tensorboard = sys.modules.get("torch.utils.tensorboard")
    is_writer = tensorboard is not None and isinstance(experiment, tensorboard.SummaryWriter)
    if is_writer and getattr(logger, "log_dir", None):
        return TensorBoardRun(experiment, logger.log_dir, is_own=False)
    if "WandbLogger" in kinds:
        return WandbRun(name, _values_of(logger))
    if "MLFlowLogger" in kinds:
        return MlflowRun(name, _values_of(logger), experiment, logger.run_id)
    if "CometLogger" in kinds:
        return CometExperiment(name, _values_of(logger), experiment)
    destination = ValuesOnly(name, _values_of(logger))
    if "CSVLogger" in kinds:
        destination.folder = logger.log_dir
    return destination


def _values_of(logger: Any) -> LogMetrics:
    def log_metrics(values: Mapping[str, Any], step: int) -> None:
        logger.log_metrics(dict(values), step=step)

    return log_metrics
