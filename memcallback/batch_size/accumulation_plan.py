"""AccumulationPlan: an effective batch size, divided among ranks and forward passes."""

from __future__ import annotations

from dataclasses import dataclass

from memcallback.core.validation import whole_number


@dataclass(frozen=True, kw_only=True)
class AccumulationPlan:
    """Gradient accumulation: batches whose sizes add up to exactly an effective batch size.

    Attributes:
        batch_size: Samples in one forward pass on one rank.
        accumulate: Forward passes between two updates.
        world_size: How many ranks train.
    """

    batch_size: int
    accumulate: int
    world_size: int = 1

    @property
    def effective_batch_size(self) -> int:
        """Samples between two updates, on all ranks."""
        return self.batch_size * self.accumulate * self.world_size


def samples_of_rank(effective_batch_size: int, world_size: int) -> int:
    """A rank's samples between two updates, after a check."""
    whole_number(
        "effective_batch_size",
        effective_batch_size,
        "Give the number of samples between two updates.",
    )
    if effective_batch_size % world_size:
        raise ValueError(
            f"effective_batch_size must be a multiple of {world_size}, the number of ranks, "
            f"got {effective_batch_size}. The nearest is "
            f"{max(1, round(effective_batch_size / world_size)) * world_size}."
        )
    return effective_batch_size // world_size
