"""Memory savings of a Trainer: applies and undoes them, and says what they save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from memcallback.core.errors import reason_of, warn_and_go_on
from memcallback.core.interruptions import ENDS, raise_if_meant
from memcallback.core.visible import visible_name
from memcallback.devices.catalogue import Device
from memcallback.integrations.lightning.trainer.package import of_lightning
from memcallback.prediction.predict_or_warn import traced
from memcallback.prediction.prediction import Prediction
from memcallback.report.report import Report
from memcallback.savings.accumulation import check_accumulate
from memcallback.savings.checkpointing import (
    Checkpointing,
    CheckpointOption,
    check_checkpoint,
    checkpoint_option,
)
from memcallback.savings.mixed_precision import CountingGradScaler, check_precision
from memcallback.step.training_step import TrainingStep


class TrainerSavings:
    """Applies `MemoryCallback(accumulate=..., amp=..., checkpoint=...)` to a Trainer and module.

    Attributes:
        prediction_without: The prediction of the step without them; None if there is none.
    """

    def __init__(
        self,
        accumulate: int | Mapping[int, int] | None,
        amp: str | None,
        checkpoint: CheckpointOption | None,
    ) -> None:
        numbers = accumulate.values() if isinstance(accumulate, Mapping) else (accumulate,)
        for number in numbers if accumulate is not None else ():
            check_accumulate(number)
        if amp is not None:
            check_precision(amp)
        if checkpoint:
            check_checkpoint(checkpoint)
        self._accumulate = accumulate
        self._amp = amp
        self._checkpoint = checkpoint
        self._scaler: CountingGradScaler | None = None
        self._last_state: dict[str, Any] = {}
        self._checkpointing: Checkpointing | None = None
        self._undo: list[Callable[[], None]] = []
        self.prediction_without: Prediction | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings; what is applied stays the original's to undo."""
        return vars(self) | {
            "_scaler": None,
            "_last_state": self.state_dict(),
            "_checkpointing": None,
            "_undo": [],
        }

    def setup(self, trainer: Any, pl_module: Any, print_fn: Callable[[str], None]) -> None:
        """Set the accumulation and the precision, before the Trainer sets up its strategy."""
        self.undo()
        self._last_state = {}
        if self._accumulate is not None:
            self._set_accumulation(trainer, pl_module, self._accumulate)
        if self._amp is not None:
            self._set_precision(trainer, self._amp, print_fn)

    def checkpoint(self, pl_module: Any) -> None:
        """Checkpoint the module, which now has all its layers (`setup`, `configure_model`)."""
        if self._checkpoint:
            self._checkpointing = checkpoint_option(pl_module, self._checkpoint)
            self._undo.append(self._checkpointing.undo)

    def undo(self) -> None:
        """Restore Trainer and module as they were before `setup`; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
        if self._scaler is not None:
            self._last_state = self._scaler.state_dict()
            self._scaler = None

    def _set_accumulation(
        self, trainer: Any, pl_module: Any, accumulate: int | Mapping[int, int]
    ) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"accumulate={accumulate} is for automatic optimization, and "
                f"{type(pl_module).__name__} steps its optimizers itself. Leave it out, and "
                "step them after several batches in training_step."
            )
        scheduler_class = of_lightning(trainer, "callbacks").GradientAccumulationScheduler
        has = ""
        if any(isinstance(callback, scheduler_class) for callback in trainer.callbacks):
            has = "a GradientAccumulationScheduler"
        elif trainer.accumulate_grad_batches != 1:
            has = f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        if has:
            raise ValueError(
                f"MemoryCallback(accumulate={accumulate}) cannot be applied, because the Trainer "
                f"has {has}. Leave one of them out."
            )
        self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", 1))
        if isinstance(accumulate, Mapping):
            scheduler = scheduler_class(dict(accumulate))
            trainer.callbacks.append(scheduler)
            self._undo.append(lambda: trainer.callbacks.remove(scheduler))
        else:
            trainer.accumulate_grad_batches = accumulate

    def _set_precision(self, trainer: Any, precision: str, print_fn: Callable[[str], None]) -> None:
        strategy = trainer.strategy
        before = strategy.precision_plugin
        if type(before).__name__ != "Precision":
            raise ValueError(
                f"MemoryCallback(amp={precision!r}) cannot be applied, because the Trainer has "
                f"precision {trainer.precision} ({type(before).__name__}, "
                f"{type(strategy).__name__}). Leave amp out, and give Trainer(precision=...)."
            )
        device_type = strategy.root_device.type
        if precision == "16-mixed":
            self._scaler = CountingGradScaler(device_type, say=print_fn)
        else:
            self._scaler = None
        strategy.precision_plugin = of_lightning(trainer, "plugins.precision").MixedPrecision(
            precision, device_type, self._scaler
        )
        self._undo.append(lambda: setattr(strategy, "precision_plugin", before))

    def state_dict(self) -> dict[str, Any]:
        """The state of our GradScaler; empty without one.

        Lightning's own checkpoints have it only as long as the fit lasts.
        """
        return self._last_state if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
        if self._scaler is not None and state_dict:
            self._scaler.load_state_dict(state_dict)

    # What they save.

    def predict_without(
        self, make_step: Callable[[], TrainingStep], device: Device | Exception
    ) -> Prediction | None:
        """Predict the Trainer's step without the savings; None, or a warning, if that cannot be."""
        if isinstance(device, Exception):
            return None
        try:
            with self._removed_from(make_step()) as step:
                if step is not None:
                    return traced(step, device, lambda _: None)
        except ENDS as error:  # a model can fail on fake tensors, and training goes on
            raise_if_meant(error)
            warn_and_go_on(
                "Cannot compare with and without memory savings: predicting the step without them "
                f"failed. {reason_of(error)}"
            )
        return None

    @contextmanager
    def _removed_from(self, step: TrainingStep) -> Iterator[TrainingStep | None]:
        """Give the step without the savings inside the context; None if there are none."""
        changes: dict[str, Any] = {} if self._accumulate is None else {"accumulate": 1}
        if self._amp is not None:
            changes["precision"] = "32-true"
        is_checkpointed = self._checkpointing is not None and bool(self._checkpointing.names)
        with self._checkpointing.paused() if self._checkpointing is not None else nullcontext():
            yield step.varied(**changes) if changes or is_checkpointed else None

    def complete(self, report: Report, batch_size: int | None, accumulate: int) -> Report:
        """Add to a report what the savings do, and the prediction without them."""
        report = replace(report, notes=(*report.notes, *self._notes(batch_size, accumulate)))
        if self.prediction_without is not None and report.prediction is not None:
            num_samples = report.prediction.batch_size * accumulate
            with suppress(ValueError):  # a trace at one batch size alone; a caveat says so
                return replace(report, without_savings=self.prediction_without.at(num_samples))
        return report

    def _notes(self, batch_size: int | None, accumulate: int) -> Iterator[str]:
        if self._accumulate is not None:
            size = ""
            if batch_size is not None:
                num_samples = accumulate * batch_size
                size = f" of {batch_size}, so {num_samples} samples on this device,"
            yield f"{accumulate} batches{size} make one update (accumulate)."
        if self._scaler is not None:
            yield (
                f"{self._scaler.num_skipped_steps} of {self._scaler.num_steps} steps were skipped "
                "for gradients with inf or nan (amp)."
            )
        if self._checkpointing is not None and self._checkpointing.names:
            names = ", ".join(
                visible_name(name) or "(root module)" for name in self._checkpointing.names
            )
            yield f"Recomputed in the backward pass: {names} (checkpoint)."
