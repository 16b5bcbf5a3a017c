"""The recorder and the monitor of a Trainer's fit; and memory that runs out where neither is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memcallback.batch_size.bounds import BatchSizeBounds
from memcallback.core.files import inside, place_of
from memcallback.diagnose.out_of_memory.context import OomContext
from memcallback.integrations.lightning.trainer.state import print_beside, progress_of, stage_of
from memcallback.record.monitor import Monitor
from memcallback.record.oom_response import explain_or_warn, respond
from memcallback.record.rank_exchange import rank_here
from memcallback.record.recorder import MemoryRecorder
from memcallback.record.sampling import sample_interval
from memcallback.record.settings import MonitorSettings
from memcallback.report.report import Report

if TYPE_CHECKING:
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport


def optimizers_of(trainer: Any) -> list[torch.optim.Optimizer]:
    """The Trainer's optimizers that are PyTorch's, so that they take hooks."""
    return [
        optimizer
        for optimizer in trainer.optimizers
        if isinstance(optimizer, torch.optim.Optimizer)
    ]


def recorder_of(
    trainer: Any, pl_module: Any, *, reset_peaks: bool, per_module: bool
) -> MemoryRecorder:
    """A recorder of the training that a Trainer begins."""
    device = trainer.strategy.root_device
    profilers = {kind.__name__ for kind in type(trainer.profiler).__mro__}
    return MemoryRecorder(
        pl_module,
        optimizers_of(trainer),
        device=device,
        sample_every_n_steps=sample_interval(device),
        reset_peaks=reset_peaks,
        per_module=per_module,
        use_profiler="PyTorchProfiler" not in profilers,
    )


def monitor_of(
    trainer: Any,
    pl_module: Any,
    recorder: MemoryRecorder,
    settings: MonitorSettings,
    complete: Callable[[Report], Report],
) -> Monitor:
    """A monitor of the training that a Trainer begins; it logs where the Trainer does."""
    return Monitor(
        recorder,
        settings,
        print_fn=print_beside(pl_module),
        folder=_folder_of(trainer),
        is_main=trainer.is_global_zero,
        loggers=trainer.loggers,
        progress=lambda: progress_of(trainer),
        bounds=BatchSizeBounds.of_loader(trainer.train_dataloader, trainer.world_size),
        complete=complete,
    )


def explain_unrecorded(
    trainer: Any, pl_module: Any, error: BaseException, print_fn: Callable[[str], None]
) -> OutOfMemoryReport | None:
    """Report memory that ran out before training, in a test or in a prediction; else None."""
    context = OomContext(
        device=trainer.strategy.root_device,
        modules=[pl_module],
        phase=stage_of(trainer),
        rank=rank_here(),
    )
    report = explain_or_warn(error, context)
    if report is None:
        return None
    return respond(report, print_fn=print_fn, folder=_folder_of(trainer))


def _folder_of(trainer: Any) -> str | None:
    """Where our own files go; None for nowhere."""
    if trainer.fast_dev_run:
        return None
    return inside(place_of(trainer.default_root_dir), "memcallback")
