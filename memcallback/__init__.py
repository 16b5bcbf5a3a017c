"""See where device memory goes while a PyTorch model trains, know it before the first step, and find the largest batch.

    from memcallback import MemoryCallback
    trainer = Trainer(callbacks=[MemoryCallback()])

Reading order: `units`, `events`, `stats` (one type for measured and predicted), `batch_trace`, `replay`, `prediction`,
`advise`, `report`; then, with PyTorch, `holdings`, `meters`, `recorder`, `steps`, `loops`, `tracer`, `tracing`, `savings`; then the adapters
`tensorboard`, `sinks`, `fit`, `callback`, `cli`. What needs PyTorch or Lightning is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from memcallback.advice import BatchSizeAdvice
from memcallback.events import Category, Phase
from memcallback.fitted import FittedBatchSize
from memcallback.layer_table import Layer, LayerTable
from memcallback.module_memory import ModuleTable
from memcallback.oom_report import OutOfMemoryReport
from memcallback.plan import Plan, PlanRow
from memcallback.prediction import Prediction
from memcallback.stats import DeviceMemory, Kind, MemoryStats, PhaseMemory, StepMemory
from memcallback.tensor_changes import TensorChange
from memcallback.textbook_law import TextbookPrediction
from memcallback.units import format_bytes, parse_bytes
from memcallback.warn import MemoryWarning

if TYPE_CHECKING:
    from memcallback.callback import MemoryCallback
    from memcallback.fit import fit_batch_size
    from memcallback.huggingface_callback import MemoryTrainerCallback
    from memcallback.memory_log import MemoryLog
    from memcallback.planning import what_if
    from memcallback.ranks import Ranks
    from memcallback.recorder import MemoryRecorder
    from memcallback.savings import DryRun, accumulate, amp, checkpoint, dry_run
    from memcallback.shape_pass import layers
    from memcallback.steps import PredictionError, TrainingStep
    from memcallback.suggestion import suggest_batch_size
    from memcallback.tensor_diff import TensorDiff
    from memcallback.tracing import predict

__version__ = "0.1.0"

__all__ = [
    "BatchSizeAdvice",
    "Category",
    "DeviceMemory",
    "DryRun",
    "FittedBatchSize",
    "Kind",
    "Layer",
    "LayerTable",
    "MemoryCallback",
    "MemoryLog",
    "MemoryRecorder",
    "MemoryStats",
    "MemoryTrainerCallback",
    "MemoryWarning",
    "ModuleTable",
    "OutOfMemoryReport",
    "Phase",
    "PhaseMemory",
    "Plan",
    "PlanRow",
    "Prediction",
    "PredictionError",
    "Ranks",
    "StepMemory",
    "TensorChange",
    "TensorDiff",
    "TextbookPrediction",
    "TrainingStep",
    "accumulate",
    "amp",
    "checkpoint",
    "dry_run",
    "fit_batch_size",
    "format_bytes",
    "layers",
    "parse_bytes",
    "predict",
    "suggest_batch_size",
    "what_if",
]

_ON_FIRST_USE = {
    "DryRun": "savings",
    "MemoryCallback": "callback",
    "MemoryLog": "memory_log",
    "MemoryRecorder": "recorder",
    "MemoryTrainerCallback": "huggingface_callback",
    "PredictionError": "steps",
    "Ranks": "ranks",
    "TensorDiff": "tensor_diff",
    "TrainingStep": "steps",
    "accumulate": "savings",
    "amp": "savings",
    "checkpoint": "savings",
    "dry_run": "savings",
    "fit_batch_size": "fit",
    "layers": "shape_pass",
    "predict": "tracing",
    "suggest_batch_size": "suggestion",
    "what_if": "planning",
}


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"memcallback.{_ON_FIRST_USE[name]}"), name)
    globals()[name] = value
    return value
