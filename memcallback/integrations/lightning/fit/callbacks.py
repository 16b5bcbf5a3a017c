"""What other callbacks mean for the search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from memcallback.integrations.lightning.trainer.state import lightning_of

#: Lightning's callbacks that later train more parameters, or hold more, than at the beginning.
_CHANGE_LATER = ("BaseFinetuning", "ModelPruning", "StochasticWeightAveraging")


def largest_accumulation(trainer: Any) -> int:
    """Batches for each update: the most that a training comes to, at least 1.

    A GradientAccumulationScheduler tells the Trainer at the beginning of an epoch, which a search
    does not wait for.
    """
    return max(_accumulations(trainer))


@contextmanager
def accumulating(trainer: Any, num_batches: int) -> Iterator[None]:
    """A Trainer with so many batches for each update, inside the context."""
    before = trainer.accumulate_grad_batches
    trainer.accumulate_grad_batches = num_batches
    try:
        yield
    finally:
        trainer.accumulate_grad_batches = before


def notes_on_callbacks(trainer: Any) -> tuple[str, ...]:
    """What no trial at the beginning of a training can show, in a sentence that names the
    callbacks; empty if there are none of that kind.
    """
    later = _of_lightning(trainer, *_CHANGE_LATER)
    names = ", ".join(
        dict.fromkeys(
            type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, later)
        )
    )
    if not names:
        return ()
    return (
        f"With {names} later steps may take much more memory than the trials, which run the first ones alone: leave room for that with "
        "a larger headroom, or look with a Trainer and a module as they will be by then.",
    )


def notes_on_updates(
    trainer: Any, batch_size: int, previous: int, num_samples: int | None
) -> tuple[str, ...]:
    """How many samples make an update, in a sentence; empty where that is a batch."""
    numbers = _accumulations(trainer)
    most = max(numbers)
    if most == 1:
        return ()
    up_to = "up to " if len(numbers) > 1 else ""
    now, before = (
        size * most if num_samples is None else min(size * most, num_samples)
        for size in (batch_size, previous)
    )
    made_of = (
        f"{up_to}{most} batches of {batch_size}" if now == most * batch_size else "all of an epoch"
    )
    where = " on each device" if trainer.world_size > 1 else ""
    return (
        f"One update is made from {up_to}{now} samples{where}, {made_of}; before it was made from {up_to}{before}.",
    )


def _accumulations(trainer: Any) -> set[int]:
    """Batches for each update in a training, at its beginning and later."""
    (scheduler,) = _of_lightning(trainer, "GradientAccumulationScheduler")
    # No end is None or -1, as Lightning has it.
    num_epochs = (
        trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else float("inf")
    )
    scheduled = {
        int(callback.get_accumulate_grad_batches(epoch))
        for callback in trainer.callbacks
        if isinstance(callback, scheduler)
        for epoch in callback.scheduling
        if epoch < num_epochs
    }
    return scheduled or {int(trainer.accumulate_grad_batches)}


def _of_lightning(trainer: Any, *names: str) -> tuple[Any, ...]:
    """Callbacks of the package that a Trainer is of."""
    module = import_module(f"{lightning_of(trainer)}.callbacks")
    return tuple(getattr(module, name) for name in names)
