"""Shows where device memory goes in training, predicts it, and finds the largest batch size.

    from memcallback import MemoryCallback
    trainer = Trainer(callbacks=[MemoryCallback()])

Each public name is imported on first use, so that `import memcallback` loads neither PyTorch nor
Lightning. ARCHITECTURE.md says what each folder is for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcallback.batch_size.advice import BatchSizeAdvice
    from memcallback.batch_size.fitted import FittedBatchSize
    from memcallback.batch_size.suggest import suggest_batch_size
    from memcallback.core.errors import MemoryWarning, PredictionError
    from memcallback.core.module_table import ModuleTable
    from memcallback.core.step_memory import DeviceMemory, MemoryStats, PhaseMemory, StepMemory
    from memcallback.core.types import Category, Kind, Phase, Stage
    from memcallback.core.units import format_bytes, parse_bytes
    from memcallback.diagnose.out_of_memory.report import OutOfMemoryReport
    from memcallback.diagnose.tensors.change import TensorChange
    from memcallback.diagnose.tensors.diff import TensorDiff
    from memcallback.integrations.huggingface.callback import MemoryTrainerCallback
    from memcallback.integrations.lightning.callback import MemoryCallback
    from memcallback.integrations.lightning.fit.fit_batch_size import fit_batch_size
    from memcallback.prediction.predict import predict
    from memcallback.prediction.prediction import Prediction
    from memcallback.prediction.textbook.law import TextbookPrediction
    from memcallback.prediction.textbook.layer_table import Layer, LayerTable
    from memcallback.prediction.textbook.shape_pass import layers
    from memcallback.record.memory_log import MemoryLog
    from memcallback.record.recorder import MemoryRecorder
    from memcallback.savings.accumulation import accumulate
    from memcallback.savings.checkpointing import checkpoint
    from memcallback.savings.mixed_precision import amp
    from memcallback.savings.plan import Plan, PlanRow, SavingGroup
    from memcallback.savings.what_if import what_if
    from memcallback.step.inference_step import InferenceStep
    from memcallback.step.ranks import Ranks
    from memcallback.step.training_step import TrainingStep

__version__ = "0.2.0"

__all__ = [
    "BatchSizeAdvice",
    "Category",
    "DeviceMemory",
    "FittedBatchSize",
    "InferenceStep",
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
    "SavingGroup",
    "Stage",
    "StepMemory",
    "TensorChange",
    "TensorDiff",
    "TextbookPrediction",
    "TrainingStep",
    "accumulate",
    "amp",
    "checkpoint",
    "fit_batch_size",
    "format_bytes",
    "layers",
    "parse_bytes",
    "predict",
    "suggest_batch_size",
    "what_if",
]

# `from memcallback import *` leaves out what needs a library that is not installed.
for _name, _libraries in (
    ("MemoryTrainerCallback", ("transformers",)),
    ("MemoryCallback", ("lightning", "pytorch_lightning")),
    ("fit_batch_size", ("lightning", "pytorch_lightning")),
):
    if not any(map(find_spec, _libraries)):
        __all__.remove(_name)

#: Public name -> the module that defines it.
_DEFINED_IN = {
    "BatchSizeAdvice": "batch_size.advice",
    "Category": "core.types",
    "DeviceMemory": "core.step_memory",
    "FittedBatchSize": "batch_size.fitted",
    "InferenceStep": "step.inference_step",
    "Kind": "core.types",
    "Layer": "prediction.textbook.layer_table",
    "LayerTable": "prediction.textbook.layer_table",
    "MemoryCallback": "integrations.lightning.callback",
    "MemoryLog": "record.memory_log",
    "MemoryRecorder": "record.recorder",
    "MemoryStats": "core.step_memory",
    "MemoryTrainerCallback": "integrations.huggingface.callback",
    "MemoryWarning": "core.errors",
    "ModuleTable": "core.module_table",
    "OutOfMemoryReport": "diagnose.out_of_memory.report",
    "Phase": "core.types",
    "PhaseMemory": "core.step_memory",
    "Plan": "savings.plan",
    "PlanRow": "savings.plan",
    "Prediction": "prediction.prediction",
    "PredictionError": "core.errors",
    "Ranks": "step.ranks",
    "SavingGroup": "savings.plan",
    "Stage": "core.types",
    "StepMemory": "core.step_memory",
    "TensorChange": "diagnose.tensors.change",
    "TensorDiff": "diagnose.tensors.diff",
    "TextbookPrediction": "prediction.textbook.law",
    "TrainingStep": "step.training_step",
    "accumulate": "savings.accumulation",
    "amp": "savings.mixed_precision",
    "checkpoint": "savings.checkpointing",
    "fit_batch_size": "integrations.lightning.fit.fit_batch_size",
    "format_bytes": "core.units",
    "layers": "prediction.textbook.shape_pass",
    "parse_bytes": "core.units",
    "predict": "prediction.predict",
    "suggest_batch_size": "batch_size.suggest",
    "what_if": "savings.what_if",
}


def __getattr__(name: str) -> object:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"memcallback.{_DEFINED_IN[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
