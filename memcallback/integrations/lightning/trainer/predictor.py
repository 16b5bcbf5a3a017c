"""StepPredictor: predicts the step of a Trainer, from the batches that its fit shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memcallback.devices.catalogue import Device
from memcallback.integrations.lightning.trainer.comparison import Compared, comparer
from memcallback.integrations.lightning.trainer.loaded_batch import LoadedBatch
from memcallback.integrations.lightning.trainer.savings import TrainerSavings
from memcallback.integrations.lightning.trainer.step import (
    UnshardedModule,
    copy_unsharded,
    step_of,
)
from memcallback.integrations.lightning.trainer.validation import (
    ValidationBatches,
    predict_validation,
    shapes_of,
)
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.record.monitor import Monitor
from memcallback.record.settings import MonitorSettings
from memcallback.step.batch import outline
from memcallback.step.training_step import TrainingStep


class StepPredictor:
    """Begins the prediction of a Trainer's first step; makes the step that ran out of memory.

    A fit shows in this order: the module before it is sharded, the batches of the sanity check, and
    the first batch of the training.
    """

    def __init__(self, settings: MonitorSettings, *, tries_savings: bool) -> None:
        self._settings = settings
        self._tries_savings = tries_savings
        self._unsharded: UnshardedModule | None = None
        self._validation_batches = ValidationBatches()
        self._loaded_batch = LoadedBatch()
        #: Of the first batch, in words; and before the module's hooks brought it to the device.
        self._first_shapes: tuple[str, Any] = "", None

    def __getstate__(self) -> dict[str, Any]:
        """A copy sees no batches of the original's fit, and does not have its module."""
        return vars(self) | {"_unsharded": None, "_loaded_batch": LoadedBatch()}

    # What a fit shows.

    def keep_unsharded(self, trainer: Any, pl_module: Any) -> None:
        """Copy the module if the Trainer is about to shard it; a later step is made from that."""
        self._unsharded = None
        if self._settings.predict:
            self._unsharded = copy_unsharded(trainer, pl_module)

    def watch(self, trainer: Any, pl_module: Any) -> None:
        """See the batches that the module brings to the device itself, to predict that too."""
        if self._settings.predict:
            self._loaded_batch.watch(trainer, pl_module)

    def end_watch(self) -> None:
        """See no further batches."""
        self._loaded_batch.end()

    def see_validation(self, batch: Any) -> None:
        """Keep the shapes of a batch of the sanity check, if it is the largest."""
        self._validation_batches.see(batch, self._loaded_batch.take())

    def forget_validation(self) -> None:
        """A fit begins: no batch of it is known."""
        self._validation_batches = ValidationBatches()

    def forget_first_batch(self) -> None:
        """The training begins: its first batch is not known."""
        self._first_shapes = "", None

    # The steps.

    def begin(
        self,
        monitor: Monitor,
        trainer: Any,
        pl_module: Any,
        batch: Any,
        *,
        device: torch.device,
        savings: TrainerSavings,
        on_predicted: Callable[[StepPrediction | None, Compared | None], None],
    ) -> None:
        """Begin to predict the first step, with and without savings, and the validation."""
        loaded = self._loaded_batch.take()
        self._loaded_batch.end()
        self._first_shapes = outline(batch), shapes_of(loaded)
        make_step = self._maker_of_step(trainer, pl_module, batch, loaded)
        if monitor.at_start is not None:
            (make_step,) = monitor.at_start.with_others(make_step)
        monitor.begin(
            make_step,
            model=pl_module,
            batch=batch,
            more=comparer(
                make_step,
                device,
                savings,
                self._settings,
                tries_savings=self._tries_savings,
                validation=self._validation_of(trainer, make_step),
            ),
            on_predicted=on_predicted,
        )

    def maker_of_failed(
        self, trainer: Any, pl_module: Any, batch: Any
    ) -> Callable[[], TrainingStep]:
        """What makes the step of a batch for which there was too little memory."""
        first, loaded = self._first_shapes
        loaded = loaded if outline(batch) == first else None
        return self._maker_of_step(trainer, pl_module, batch, loaded)

    def _maker_of_step(
        self, trainer: Any, pl_module: Any, batch: Any, loaded: Any
    ) -> Callable[[], TrainingStep]:
        size = self._settings.batch_size
        return lambda: step_of(trainer, pl_module, batch, size, self._unsharded, loaded=loaded)

    def _validation_of(
        self, trainer: Any, make_step: Callable[[], TrainingStep]
    ) -> Callable[[Device], Prediction | None] | None:
        """What predicts the validation; None if the sanity check has shown no batch."""
        seen = self._validation_batches
        if seen.batch is None or not self._settings.predict:
            return None
        return lambda device: predict_validation(trainer, make_step, seen, device)
