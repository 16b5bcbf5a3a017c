"""Sampling: chooses the steps with a split by category; on a CPU only these are read at all."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

#: Updates of which every step is sampled: the warm-up, the first steady one, and one after it.
_NUM_FIRST_SAMPLED = 3
#: Updates of which every logged step is sampled, where a reading costs milliseconds. After n
#: updates one in n/10 is, so that recording costs less and less of the training, and at last one in
#: 50, as many as Lightning logs by default.
_NUM_LOGGED_SAMPLED, _MAX_LOGGED_INTERVAL = 10, 50


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
    """

    interval: int
    counts_updates: bool = False
    counts_backward: bool = False
    num_steps: int = 0
    num_updates: int = 0
    num_optimizer_updates: int = 0
    #: Whether an update since the last step began is counted.
    _has_update: bool = False
    _sampled_since: int = 0
    _logged_since: int = 0

    def on_update(self, *_: object) -> None:
        """An optimizer has made an update."""
        self.num_optimizer_updates += 1
        if not self._has_update:
            self._has_update = True
            self.num_updates += 1

    def on_step_end(self, *, has_update: bool) -> None:
        """A step with or without an update has ended."""
        self.num_steps += 1
        if has_update and not self.counts_updates:
            self.num_updates += 1
            self.num_optimizer_updates += 1

    def begin_step(self, *, is_logged: bool) -> bool:
        """Whether the step that begins is sampled; `is_logged` asks for one between the others."""
        self._has_update = False
        # We count updates, since an accumulation window has several steps.
        progress = self.num_updates if self.counts_updates else self.num_steps
        if progress - self._sampled_since >= self.interval:
            self._sampled_since = progress
        is_regular = progress < _NUM_FIRST_SAMPLED or progress == self._sampled_since
        return is_regular or (is_logged and self._samples_logged())

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
