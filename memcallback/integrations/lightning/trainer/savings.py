"""Apply accumulate/amp/checkpoint to a Trainer and undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

from memcallback.integrations.lightning.trainer.state import lightning_of
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
    """What `MemoryCallback(accumulate=..., amp=..., checkpoint=...)` does to a Trainer and its
    module.
    """

    def __init__(
        self,
        accumulate: int | Mapping[int, int] | None,
        amp: str | None,
        checkpoint: CheckpointOption | None,
    ) -> None:
        for number in (
            accumulate.values()
            if isinstance(accumulate, Mapping)
            else ()
            if accumulate is None
            else (accumulate,)
        ):
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

    def setup(self, trainer: Any, pl_module: Any, say: Callable[[str], None]) -> None:
        """Before the Trainer sets up its strategy: set the accumulation and the precision."""
        self.undo()
        self._last_state = {}
        if self._accumulate is not None:
            self._set_accumulation(trainer, pl_module, self._accumulate)
        if self._amp is not None:
            self._set_precision(trainer, self._amp, say)

    def checkpoint(self, pl_module: Any) -> None:
        """Checkpoint the module, which has all of its layers by now (`setup`, `configure_model`)."""
        if self._checkpoint:
            self._checkpointing = checkpoint_option(pl_module, self._checkpoint)
            self._undo.append(self._checkpointing.undo)

    @contextmanager
    def taken_from(self, step: TrainingStep) -> Iterator[TrainingStep | None]:
        """The Trainer's step as it would be without the savings, inside the context; None if there
        are none.
        """
        changes: dict[str, Any] = {} if self._accumulate is None else {"accumulate": 1}
        if self._amp is not None:
            changes["precision"] = "32-true"
        is_checkpointed = self._checkpointing is not None and bool(self._checkpointing.names)
        with self._checkpointing.paused() if self._checkpointing is not None else nullcontext():
            yield step.varied(**changes) if changes or is_checkpointed else None

    def undo(self) -> None:
        """Leave Trainer and module as they were before `setup`; a second time nothing happens."""
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
                f"accumulate={accumulate} is for automatic optimization, and {type(pl_module).__name__} steps its optimizers itself. Leave it "
                "out, and call them every so many batches in training_step."
            )
        scheduler_class = import_module(
            f"{lightning_of(trainer)}.callbacks"
        ).GradientAccumulationScheduler
        is_scheduled = any(isinstance(callback, scheduler_class) for callback in trainer.callbacks)
        if trainer.accumulate_grad_batches != 1 or is_scheduled:
            has = (
                "a GradientAccumulationScheduler"
                if is_scheduled
                else f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
            )
            raise ValueError(
                f"MemoryCallback(accumulate={accumulate}) for a Trainer that has {has}. Leave one of them out."
            )
        self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", 1))
        if isinstance(accumulate, Mapping):
            scheduler = scheduler_class(dict(accumulate))
            trainer.callbacks.append(scheduler)
            self._undo.append(lambda: trainer.callbacks.remove(scheduler))
        else:
            trainer.accumulate_grad_batches = accumulate

    def _set_precision(self, trainer: Any, precision: str, say: Callable[[str], None]) -> None:
        strategy = trainer.strategy
        before = strategy.precision_plugin
        if type(before).__name__ != "Precision":
            raise ValueError(
                f"MemoryCallback(amp={precision!r}) for a Trainer of precision {trainer.precision} ({type(before).__name__}, "
                f"{type(strategy).__name__}). Leave it out, and give Trainer(precision=...)."
            )
        device_type = strategy.root_device.type
        self._scaler = CountingGradScaler(device_type, say=say) if precision == "16-mixed" else None
        strategy.precision_plugin = import_module(
            f"{lightning_of(trainer)}.plugins.precision"
        ).MixedPrecision(precision, device_type, self._scaler)
        self._undo.append(lambda: setattr(strategy, "precision_plugin", before))

    # What is kept and said.

    def state_dict(self) -> dict[str, Any]:
        """The state of the GradScaler, which Lightning's own checkpoints have only as long as the
        fit lasts; empty without one.
        """
        return self._last_state if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if self._scaler is not None and state_dict:
            self._scaler.load_state_dict(state_dict)

    def notes(self, batch_size: int | None, accumulate: int) -> tuple[str, ...]:
        """What the savings are in this fit, one sentence each."""
        said = []
        if self._accumulate is not None:
            of = (
                ""
                if batch_size is None
                else f" of {batch_size}, so {accumulate * batch_size} samples on this device,"
            )
            said.append(f"{accumulate} batches{of} make one update (accumulate).")
        if self._scaler is not None:
            said.append(
                f"{self._scaler.num_skipped_steps} of {self._scaler.num_steps} steps were skipped for gradients with inf or nan (amp)."
            )
        if self._checkpointing is not None and self._checkpointing.names:
            names = ", ".join(name or "(root module)" for name in self._checkpointing.names)
            said.append(f"Computed again in the backward pass: {names} (checkpoint).")
        return tuple(said)
