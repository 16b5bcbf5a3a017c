"""What the other callbacks of a Trainer do to a training. A search runs without them, so what bears on memory is read from them beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from memcallback.trial import lightning_of


def largest_accumulation(trainer: Any) -> int:
    """Batches for each update: the most that a training comes to, at least 1.

    A GradientAccumulationScheduler tells the Trainer at the beginning of an epoch, which a search does not wait for.

    Args:
        trainer: The Trainer.
    """
    scheduler = import_module(f"{lightning_of(trainer)}.callbacks").GradientAccumulationScheduler
    # No end is None or -1, as Lightning has it.
    num_epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else float("inf")
    scheduled = [
        callback.get_accumulate_grad_batches(epoch)
        for callback in trainer.callbacks
        if isinstance(callback, scheduler)
        for epoch in callback.scheduling
        if epoch < num_epochs
    ]
    return int(max([trainer.accumulate_grad_batches, *scheduled]))


@contextmanager
def accumulating(trainer: Any, num_batches: int) -> Iterator[None]:
    """A Trainer with so many batches for each update, inside the context.

    Args:
        trainer: The Trainer.
        num_batches: Batches for each update.
    """
    before = trainer.accumulate_grad_batches
    trainer.accumulate_grad_batches = num_batches
    try:
        yield
    finally:
        trainer.accumulate_grad_batches = before
