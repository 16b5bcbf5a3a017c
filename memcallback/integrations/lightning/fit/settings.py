"""Search settings and memory budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memcallback.batch_size.advice import DEFAULT_HEADROOM, DEFAULT_MULTIPLE
from memcallback.batch_size.estimate import check_headroom
from memcallback.core.validation import whole_number
from memcallback.devices.catalogue import CONTEXT_BYTES
from memcallback.devices.memory import device_memory, usable_bytes

#: How a limit is given, for an error: the callback has no argument for it.
GIVE_LIMIT = "memcallback.fit_batch_size(trainer, module, max_batch_size=...) before trainer.fit, without MemoryCallback(fit_batch_size=True)"


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How a batch size is looked for.

    Attributes:
        capacity_bytes: The memory to plan for; None for that of the device that trains.
        headroom: The fraction of it to keep free, at least 0 and below 1.
        num_updates: Optimizer updates in a trial, at least 2: the second is the first that has
            optimizer state and gradients.
        max_batch_size: The largest size to consider; None for no end but the data's.
        multiple_of: The size is to be a multiple of this, if at least so many samples fit; at least
            1.
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
            "The first has neither optimizer state nor gradients before it. Leave it out for 3.",
            least=2,
        )
        whole_number("multiple_of", self.multiple_of, "1 is for any batch size.")
        if self.max_batch_size is not None:
            whole_number(
                "max_batch_size", self.max_batch_size, "Leave it out for no limit but the data's."
            )


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What may be used of a device.

    Attributes:
        capacity_bytes: Its memory.
        headroom: The fraction to keep free.
        is_given: Whether the capacity was given, so that nothing is known of what else is on such a
            device.
        outside_bytes: What others than this process's allocator use.
    """

    capacity_bytes: int
    headroom: float
    is_given: bool
    outside_bytes: int

    @property
    def budget_bytes(self) -> int:
        """What the allocator may be expected to take: the capacity less all of the headroom."""
        return self._less(self.headroom)

    @property
    def verified_budget_bytes(self) -> int:
        """What it may be measured to take, less half of the headroom: the rest is for what a
        prediction leaves out, validation above all.
        """
        return self._less(self.headroom / 2)

    def _less(self, headroom: float) -> int:
        return int(self.capacity_bytes * (1 - headroom)) - self.outside_bytes


def check_supported(trainer: Any, module: Any) -> None:
    """See that a Trainer's step can be run on one rank alone and put back."""
    if trainer.fast_dev_run:
        raise ValueError(
            "Trainer(fast_dev_run=True) trains with a few batches of any size, and none is looked for. Leave one of the two out."
        )
    model = trainer.strategy.model
    if model is not module and type(model).__name__ not in (
        "DistributedDataParallel",
        "OptimizedModule",
    ):
        raise ValueError(
            f"The strategy {type(trainer.strategy).__name__} wraps the module in a {type(model).__name__}, which cannot be run on one rank alone "
            "and put back. A batch size is found for a single device and for DistributedDataParallel (strategy='ddp')."
        )


def room_on(device: torch.device, settings: FitSettings) -> MemoryBudget:
    """What may be used of the device that trains."""
    capacity, outside = settings.capacity_bytes, 0
    if capacity is None and device.type == "cpu":
        raise ValueError(
            "The module trains on a CPU, whose memory the whole machine shares: a batch that fills it stops other programs. Say how much may be "
            "used, such as capacity='8GiB' (MemoryCallback(device='8GiB'))."
        )
    if capacity is None:
        memory = device_memory(device)
        outside = memory.non_pytorch_bytes or 0
        capacity = usable_bytes(device, memory.capacity_bytes, outside)
    if capacity is None:
        raise ValueError(
            f"How much memory {device} has is not known here. Say how much may be used, such as capacity='16GiB' (MemoryCallback(device='16GiB'))."
        )
    # A context grows with the first kernels.
    outside = max(outside, CONTEXT_BYTES) if device.type == "cuda" else outside
    return MemoryBudget(
        capacity_bytes=capacity,
        headroom=settings.headroom,
        is_given=settings.capacity_bytes is not None,
        outside_bytes=outside,
    )
