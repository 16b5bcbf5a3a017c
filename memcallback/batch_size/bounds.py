"""BatchSizeBounds: what bounds a batch size besides memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memcallback.core.interruptions import raise_if_meant
from memcallback.core.validation import DEFAULT_MULTIPLE, whole_number
from memcallback.prediction.search import largest_up_to

#: How many multiples below the most that fit are all tried, and then how many sizes.
_NUM_NEAREST = 64


@dataclass(frozen=True, kw_only=True)
class BatchSizeBounds:
    """Bounds of a batch size other than memory. All numbers are at least 1.

    Attributes:
        multiple_of: The batch size is a multiple of this, if at least so many samples fit.
        max_batch_size: The largest batch size; None for no such bound.
        dataset_size: Samples in the dataset, shared by all ranks; None if unknown.
        world_size: How many ranks train with a batch of their own.
        num_microbatches: How many batches of that size a pipeline runs in each step.
    """

    multiple_of: int = DEFAULT_MULTIPLE
    max_batch_size: int | None = None
    dataset_size: int | None = None
    world_size: int = 1
    num_microbatches: int = 1

    def __post_init__(self) -> None:
        whole_number("multiple_of", self.multiple_of, "Give 1 for any batch size.")
        whole_number("world_size", self.world_size, "Give 1 for one device.")
        whole_number("num_microbatches", self.num_microbatches, "Give 1 if there is no pipeline.")
        for name in ("max_batch_size", "dataset_size"):
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, "Leave it out if there is no such limit.")
        if self.dataset_size is not None and self.dataset_size < self.num_batches:
            microbatches = (
                f" with {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
            )
            raise ValueError(
                f"dataset_size must be at least {self.num_batches}, got {self.dataset_size} "
                f"samples for {self.world_size} ranks{microbatches}: each needs one."
            )

    @classmethod
    def of_loader(cls, loader: Any, num_ranks: int) -> BatchSizeBounds:
        """The bounds by a data loader's dataset; none if its length in samples is unknown."""
        if all(getattr(loader, name, None) is None for name in ("batch_size", "batch_sampler")):
            return DEFAULT_BOUNDS  # the dataset has ready batches
        try:
            return cls(dataset_size=len(loader.dataset), world_size=num_ranks)
        except Exception as error:  # several loaders, a stream, few samples, or the user's code
            raise_if_meant(error)
            return DEFAULT_BOUNDS

    def beside(self, batch_size: int | None) -> BatchSizeBounds:
        """The bounds of a training with batches of a size.

        The dataset is left out if its share for a rank is smaller than a batch: then its items are
        no samples.
        """
        if batch_size is None or self.dataset_size is None:
            return self
        # A sampler gives each rank as many samples, and so some of them twice.
        share = -(-self.dataset_size // self.num_batches)
        return self if batch_size <= share else replace(self, dataset_size=None)

    @property
    def num_batches(self) -> int:
        """How many batches run at a time, on all ranks."""
        return self.world_size * self.num_microbatches

    @property
    def share_of_dataset(self) -> int | None:
        """Samples of the dataset in a rank's batch at most; None if unknown."""
        return None if self.dataset_size is None else self.dataset_size // self.num_batches

    @property
    def most(self) -> int | None:
        """The smaller of `max_batch_size` and a rank's share of the dataset; None if neither."""
        bounds = (self.max_batch_size, self.share_of_dataset)
        return min((bound for bound in bounds if bound is not None), default=None)

    def within(self, num_samples: int, fits: Callable[[int], bool] = lambda _: True) -> int:
        """The largest batch size up to `num_samples` that keeps the bounds and fits; 0 if none.

        `num_samples` fits. Of the sizes below it the nearest are all tried, the others as in
        `largest_up_to`: all multiples of a number may need far more than the sizes beside them.
        """
        most = num_samples if self.most is None else min(num_samples, self.most)
        for unit in (self.multiple_of, 1):

            def holds(number: int, unit: int = unit) -> bool:
                return number * unit == num_samples or fits(number * unit)

            near, far = most // unit, most // unit - _NUM_NEAREST
            nearest = next((number for number in range(near, max(0, far), -1) if holds(number)), 0)
            if number := nearest or largest_up_to(far, holds):
                return number * unit
        return 0


DEFAULT_BOUNDS = BatchSizeBounds()
