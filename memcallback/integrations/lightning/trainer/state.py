"""Reads a Trainer: its stage, progress and logging step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from memcallback.diagnose.health.growth import Progress

_COLOUR = re.compile("\x1b\\[[0-9;]*m")
#: Lightning's stages in words.
_STAGES = {
    "train": "training, between steps",
    "validate": "validation",
    "sanity_check": "validation before training",
    "test": "test",
    "predict": "prediction",
}


def stage_of(trainer: Any) -> str:
    """What runs outside of training steps, in words; empty if nothing does."""
    return _STAGES.get(getattr(trainer.state.stage, "value", ""), "")


def progress_of(trainer: Any) -> Progress:
    """The progress of a fit, in batches."""
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


def print_beside(pl_module: Any) -> Callable[[str], None]:
    """A print function that leaves the progress bar intact, on rank zero."""

    def print_text(text: str) -> None:
        trainer = getattr(pl_module, "_trainer", None)
        kinds = type(getattr(trainer, "progress_bar_callback", None)).__mro__
        if any(kind.__name__ == "RichProgressBar" for kind in kinds):
            text = _COLOUR.sub("", text)  # rich has codes of its own
        pl_module.print(text)

    return print_text
