"""StepPredictor: predicts the step of a transformers Trainer, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from memcallback.core.units import format_bytes
from memcallback.integrations.huggingface.frames import inputs_in, training_step_here
from memcallback.integrations.huggingface.step import PlannedEvaluation, more_samples, step_of
from memcallback.prediction.prediction import Prediction, StepPrediction
from memcallback.record.allocator_at_start import MakeStep
from memcallback.record.monitor import Monitor
from memcallback.record.settings import MonitorSettings
from memcallback.step.loss import Loss
from memcallback.step.ranks import replicated
from memcallback.step.training_step import TrainingStep

_WITHOUT_BUCKETS = (
    "The evaluation is predicted after a training without DistributedDataParallel. The buckets of "
    "its gradients, {}, come on top."
)


class StepPredictor:
    """Begins the prediction of a training's first step; makes the step that ran out of memory.

    It has the training's model and data loader, so it is let go when the training ends.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        args: Any,
        state: Any,
        *,
        trained: torch.nn.Module,
        evaluated: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loader: Any,
        loss: Loss | None,
    ) -> None:
        self._settings = settings
        self._args = args
        self._state = state
        self._trained = trained
        self._evaluated = evaluated
        self._optimizer = optimizer
        self._loader = loader
        self._loss = loss
        #: The Trainer's `compute_loss`, once its first step runs.
        self._found_loss: Callable[..., torch.Tensor] | None = None

    def begin(
        self,
        monitor: Monitor,
        inputs: dict[str, Any],
        on_predicted: Callable[[StepPrediction | None, Any], None],
    ) -> None:
        """Begin to predict the step that is calling the model, and the evaluation after it."""
        whole: Mapping[str, Any] = inputs
        make_simpler = num_items = evaluation = None
        if self._loss is None and (found := training_step_here()) is not None:
            trainer, whole, num_items = found
            self._found_loss = trainer.compute_loss
            make_simpler = partial(self._step, self._trained, inputs, None)
            evaluation = PlannedEvaluation.of(trainer) if self._settings.predict else None
            ddp = replicated(self._trained)
            if evaluation is not None and ddp is not None and not ddp.gradient_as_bucket_view:
                num_bytes = sum(one.nbytes for one in ddp.parameters() if one.requires_grad)
                note = _WITHOUT_BUCKETS.format(format_bytes(num_bytes))
                monitor.notes = (*monitor.notes, note)
        if self._settings.batch_size is None:
            notes = more_samples(whole, self._args.train_batch_size)
            monitor.notes = (*monitor.notes, *notes)
        loss = self._loss_for(num_items)
        makers: list[MakeStep] = [
            partial(self._step, model, whole, loss) for model in (self._trained, self._evaluated)
        ]
        if monitor.at_start is not None:
            makers = monitor.at_start.with_others(*makers)
        make_step, make_evaluated = makers

        def more(prediction: StepPrediction | None, say: Callable[[str], None]) -> Any:
            if evaluation is None or not isinstance(prediction, Prediction):
                return None
            return evaluation.predict(make_evaluated, whole, prediction.device)

        monitor.begin(
            make_step,
            model=self._trained,
            batch=whole,
            make_simpler=make_simpler,
            more=None if evaluation is None else more,
            on_predicted=on_predicted,
        )

    def maker_of_failed(self, error: BaseException) -> Callable[[], TrainingStep] | None:
        """What makes the step that an out-of-memory error ended; None if its inputs are unknown."""
        inputs, num_items = inputs_in(error)
        if inputs is None:
            return None
        return partial(self._step, self._trained, inputs, self._loss_for(num_items))

    def _step(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], loss: Loss | None
    ) -> TrainingStep:
        return step_of(
            model,
            inputs,
            self._optimizer,
            self._args,
            loss=loss,
            batch_size=self._settings.batch_size,
            loader=self._loader,
            goes_on_after_an_epoch=self._state.num_train_epochs > 1,
        )

    def _loss_for(self, num_items: Any) -> Loss | None:
        """The loss of a step with so many items; kept, their tensor would take device memory."""
        if self._loss is not None or self._found_loss is None:
            return self._loss
        return partial(self._found_loss, num_items_in_batch=num_items)
