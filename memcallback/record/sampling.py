"""Sampling: chooses the steps with a split by category; on a CPU only these are read at all."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TypeGuard

import torch

#: Updates of which every step is sampled: the warm-up, the first steady one, and one after it.
_NUM_FIRST_SAMPLED = 3
#: Updates of which every logged step is sampled, where a reading costs milliseconds. After n
#: updates one in n/10 is, so that recording costs less and less of the training, and at last one in
#: 50, as many as Lightning logs by default.
_NUM_LOGGED_SAMPLED, _MAX_LOGGED_INTERVAL = 10, 50
#: Batch sizes of which the first step is sampled there; a loader may never repeat one.
_MOST_BATCH_SIZES = 10


@dataclass
class Sampling:
    """Counts steps and updates, and chooses the steps that are sampled.

    Attributes:
        interval: Updates from one sampled step to the next, after the first ones.
        counts_updates: Whether optimizers call `on_update`; else each optimizer step is an update.
        counts_backward: Whether a step with a backward pass is an update too, as none can be seen.
        num_steps: Steps that have ended.
        num_updates: Updates so far. Several optimizers of one step make one update.
        num_optimizer_updates: The updates of each optimizer, as far as they are counted.
        num_unread: Those of `num_updates` whose step was not read.
    """

    interval: int
    counts_updates: bool = False
    counts_backward: bool = False
    num_steps: int = 0
    num_updates: int = 0
    num_optimizer_updates: int = 0
    num_unread: int = 0
    #: Whether an update since the last step began is counted.
    _has_update: bool = False
    _sampled_since: int = 0
    _logged_since: int = 0
    #: Whether the last step that began is read.
    _is_read: bool = True
    _batch_sizes: frozenset[int] = frozenset()

    def on_update(self, *_: object) -> None:
        """An optimizer has made an update."""
        self.num_optimizer_updates += 1
        if not self._has_update:
            self._has_update = True
            self._count_update()

    def on_step_end(self, *, has_update: bool) -> None:
        """A step with or without an update has ended."""
        self.num_steps += 1
        if has_update and not self.counts_updates:
            self._count_update()
            self.num_optimizer_updates += 1

    def _count_update(self) -> None:
        self.num_updates += 1
        self.num_unread += not self._is_read

    def begin_step(self, *, reads_all: bool, is_logged: bool, batch_size: int | None) -> bool:
        """Whether the step that begins is sampled.

        Where only sampled steps are read, so are logged ones between the others, ever fewer of
        them, and the first of a new batch size.
        """
        self._has_update = False
        # We count updates, since an accumulation window has several steps.
        progress = self.num_updates if self.counts_updates else self.num_steps
        if progress - self._sampled_since >= self.interval:
            self._sampled_since = progress
        is_sampled = progress < _NUM_FIRST_SAMPLED or progress == self._sampled_since
        if not (reads_all or is_sampled):
            is_sampled = self._is_new(batch_size) or (is_logged and self._samples_logged())
        self._is_read = reads_all or is_sampled
        if self._is_read and self._is_new(batch_size):
            self._batch_sizes |= {batch_size}
        return is_sampled

    def _is_new(self, batch_size: int | None) -> TypeGuard[int]:
        return (
            batch_size is not None
            and batch_size not in self._batch_sizes
            and len(self._batch_sizes) < _MOST_BATCH_SIZES
        )

    def _samples_logged(self) -> bool:
        """Whether the step that begins, which is to be logged, is sampled for that."""
        if not self.counts_updates:
            return True  # nobody knows where an accumulation window begins
        progress, last = self.num_updates, self._logged_since
        interval = min(_MAX_LOGGED_INTERVAL, last // _NUM_LOGGED_SAMPLED + 1)
        # In the same window as the last one, or far enough from it.
        is_sampled = progress == last or progress // interval != last // interval
        if is_sampled:
            self._logged_since = progress
        return is_sampled


def sample_interval(device: torch.device) -> int:
    """Steps between two samples, where logged steps are sampled besides."""
    # A CPU is read at those alone. Elsewhere the split by category, which walks the model, is not
    # needed as often as points.
    return sys.maxsize if device.type == "cpu" else 50
