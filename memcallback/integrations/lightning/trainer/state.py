"""Read a Trainer: progress, stage, logging step, package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from memcallback.core.document import for_console
from memcallback.diagnose.health.growth import Progress

#: What Lightning calls a stage, in words.
_STAGES = {
    "train": "training, between steps",
    "validate": "validation",
    "sanity_check": "validation before training",
    "test": "test",
    "predict": "prediction",
}


def stage_of(trainer: Any) -> str:
    """What goes on outside of training steps, in words; empty if nothing does."""
    return _STAGES.get(getattr(trainer.state.stage, "value", ""), "")


def progress_of(trainer: Any) -> Progress:
    """How far a fit is, in batches."""
    in_epoch = trainer.num_training_batches
    if in_epoch == float("inf"):
        return Progress()
    left_in_epoch = max(0, int(in_epoch) - trainer.fit_loop.batch_idx - 1)
    bounds = []
    if trainer.max_epochs not in (None, -1):
        bounds.append(
            left_in_epoch + max(0, trainer.max_epochs - trainer.current_epoch - 1) * int(in_epoch)
        )
    if trainer.max_steps not in (None, -1):
        bounds.append(
            max(0, trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        )
    return Progress(
        epoch=trainer.current_epoch,
        steps_left_in_epoch=left_in_epoch,
        steps_left=min(bounds, default=None),
    )


def step_number(trainer: Any) -> int:
    """The step that Lightning gives its loggers, so that our points lie under the user's own."""
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def is_logging_step(trainer: Any) -> bool:
    """Whether the Trainer logs after this step."""
    interval = int(trainer.log_every_n_steps)
    return interval > 0 and (step_number(trainer) + 1) % interval == 0


def say_beside(pl_module: Any) -> Callable[[str], None]:
    """What prints a text beside the progress bar, on rank zero."""
    return lambda text: pl_module.print(for_console(text))


def lightning_of(trainer: Any) -> str:
    """The package that a Trainer is of: `lightning.pytorch` or `pytorch_lightning`."""
    for kind in type(trainer).__mro__:
        for name in ("lightning.pytorch", "pytorch_lightning"):
            if kind.__module__.startswith(f"{name}."):
                return name
    raise TypeError(f"trainer must be a Lightning Trainer, got {type(trainer).__name__}.")


def as_callback(trainer: Any, own: type) -> type:
    """A class of ours as a callback of the package that a Trainer is of, which may refuse those of
    the other one.
    """
    return type(
        own.__name__, (own, import_module(f"{lightning_of(trainer)}.callbacks").Callback), {}
    )


def quiet_logger(trainer: Any, folder: str) -> Any:
    """A logger that logs nothing; its folder is one that is removed."""
    base = import_module(f"{lightning_of(trainer)}.loggers.logger").DummyLogger
    places = dict.fromkeys(("save_dir", "log_dir", "root_dir"), property(lambda self: folder))
    return type("QuietLogger", (base,), places)()
