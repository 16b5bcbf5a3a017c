"""What a search may use: its settings, the memory budget, and what the Trainer's setup allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memcallback.batch_size.estimate import check_headroom
from memcallback.core.validation import DEFAULT_HEADROOM, DEFAULT_MULTIPLE, whole_number
from memcallback.devices.catalogue import CONTEXT_BYTES
from memcallback.devices.memory import device_memory, usable_bytes
from memcallback.integrations.lightning.trainer.package import of_lightning

#: How to give a limit, for error texts; the callback has no argument for it.
GIVE_LIMIT = (
    "memcallback.fit_batch_size(trainer, module, max_batch_size=...) before trainer.fit, without "
    "MemoryCallback(fit_batch_size=True)"
)
#: Lightning's callbacks that train more parameters, or use more memory, later than at first.
_CHANGE_LATER = ("BaseFinetuning", "ModelPruning", "StochasticWeightAveraging")


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How to search for a batch size.

    Attributes:
        capacity_bytes: The memory to plan for; None for that of the device that trains.
        headroom: The fraction of it to keep free, at least 0 and below 1.
        num_updates: Optimizer updates in a trial, at least 2: only the second starts with optimizer
            state and gradients.
        max_batch_size: The largest size to consider; None for no limit but the data's.
        multiple_of: Round the size down to a multiple of this if that many samples fit; at least 1.
    """

    capacity_bytes: int | None = None
    headroom: float = DEFAULT_HEADROOM
    num_updates: int = 3
    max_batch_size: int | None = None
    multiple_of: int = DEFAULT_MULTIPLE

    def __post_init__(self) -> None:
        check_headroom(self.headroom)
        whole_number(
            "num_updates",
            self.num_updates,
            "The first update starts without optimizer state and gradients. Leave num_updates out "
            "to run 3 updates.",
            least=2,
        )
        whole_number("multiple_of", self.multiple_of, "Give 1 for any batch size.")
        if self.max_batch_size is not None:
            whole_number(
                "max_batch_size", self.max_batch_size, "Leave it out if only the data limit it."
            )


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The memory of a device that a training may use.

    Attributes:
        capacity_bytes: The device's memory.
        headroom: The fraction to keep free.
        is_given: Whether the user gave the capacity, so that other uses of the device are unknown.
        outside_bytes: Memory used outside this process's allocator.
    """

    capacity_bytes: int
    headroom: float
    is_given: bool
    outside_bytes: int

    @property
    def budget_bytes(self) -> int:
        """What the allocator may be predicted to reserve: all of the headroom stays free."""
        return self._without(self.headroom)

    @property
    def verified_budget_bytes(self) -> int:
        """What the allocator may be measured to reserve: half of the headroom stays free.

        The other half is for what a prediction does not cover, above all validation.
        """
        return self._without(self.headroom / 2)

    def _without(self, headroom: float) -> int:
        return int(self.capacity_bytes * (1 - headroom)) - self.outside_bytes


def budget_on(device: torch.device, settings: FitSettings) -> MemoryBudget:
    """The memory budget of the device that trains."""
    capacity, outside = settings.capacity_bytes, 0
    if capacity is None and device.type == "cpu":
        raise ValueError(
            "The module trains on a CPU and no capacity is given. The whole machine shares this "
            "memory, so a batch that fills it stops other programs. Say how much may be used, such "
            "as capacity='8GiB' (MemoryCallback(device='8GiB'))."
        )
    if capacity is None:
        memory = device_memory(device)
        outside = memory.non_pytorch_bytes or 0
        capacity = usable_bytes(device, memory.capacity_bytes, outside)
    if capacity is None:
        raise ValueError(
            f"The memory capacity of {device} is unknown. Say how much may be used, such as "
            "capacity='16GiB' (MemoryCallback(device='16GiB'))."
        )
    # The context grows with the first kernels.
    outside = max(outside, CONTEXT_BYTES) if device.type == "cuda" else outside
    return MemoryBudget(
        capacity_bytes=capacity,
        headroom=settings.headroom,
        is_given=settings.capacity_bytes is not None,
        outside_bytes=outside,
    )


def check_supported(trainer: Any, module: Any) -> None:
    """Check that one rank can run a Trainer's step alone, and that it can be restored."""
    if trainer.fast_dev_run:
        raise ValueError(
            "Trainer(fast_dev_run=True) trains with a few batches of any size, so there is no use "
            "in a search for a batch size. Leave out fast_dev_run or the search."
        )
    model = trainer.strategy.model
    if model is not module and type(model).__name__ not in (
        "DistributedDataParallel",
        "OptimizedModule",
    ):
        raise ValueError(
            f"The strategy {type(trainer.strategy).__name__} wraps the module in a "
            f"{type(model).__name__}, which cannot be run on one rank alone and restored. A batch "
            "size is found for a single device and for DistributedDataParallel (strategy='ddp')."
        )


def largest_accumulation(trainer: Any) -> int:
    """The most batches per update in the whole training, at least 1.

    A GradientAccumulationScheduler changes the Trainer at the start of later epochs, which a search
    does not reach.
    """
    return max(_accumulations(trainer))


@contextmanager
def accumulating(trainer: Any, num_batches: int) -> Iterator[None]:
    """Set a Trainer's batches per update inside the context."""
    before = trainer.accumulate_grad_batches
    trainer.accumulate_grad_batches = num_batches
    try:
        yield
    finally:
        trainer.accumulate_grad_batches = before


def notes_on_callbacks(trainer: Any) -> tuple[str, ...]:
    """A sentence that names the callbacks that change memory after the trials; empty for none."""
    later = _callback_classes(trainer, *_CHANGE_LATER)
    names = ", ".join(
        dict.fromkeys(
            type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, later)
        )
    )
    if not names:
        return ()
    return (
        f"{names} may make later steps take much more memory than the trials, which run only the "
        "first steps. Give a larger headroom, or search with a Trainer and a module that are set "
        "up as they will be in later steps.",
    )


def notes_on_updates(
    trainer: Any, batch_size: int, previous: int, num_samples: int | None
) -> tuple[str, ...]:
    """A sentence on the samples per update; empty if an update is one batch."""
    accumulations = _accumulations(trainer)
    num_batches = max(accumulations)
    if num_batches == 1:
        return ()
    up_to = "up to " if len(accumulations) > 1 else ""
    samples, samples_before = (
        size * num_batches if num_samples is None else min(size * num_batches, num_samples)
        for size in (batch_size, previous)
    )
    batches = (
        f"{up_to}{num_batches} batches of {batch_size}"
        if samples == num_batches * batch_size
        else "a whole epoch"
    )
    where = " on each device" if trainer.world_size > 1 else ""
    return (
        f"One update uses {up_to}{samples} samples{where} ({batches}); previously "
        f"{up_to}{samples_before}.",
    )


def _accumulations(trainer: Any) -> set[int]:
    """All numbers of batches per update that occur in a training."""
    (scheduler,) = _callback_classes(trainer, "GradientAccumulationScheduler")
    # In Lightning None and -1 are unlimited.
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


def _callback_classes(trainer: Any, *names: str) -> tuple[Any, ...]:
    """Callback classes of the Trainer's package."""
    module = of_lightning(trainer, "callbacks")
    return tuple(getattr(module, name) for name in names)
