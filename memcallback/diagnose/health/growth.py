"""Detect memory that keeps growing.

Memory in use at the end of a step goes up and down with the size of the batches, up in the first
steps and at the first of everything (optimizer state, workspaces), up until a buffer or a cache is
full, and down at the end of an epoch. None of that is a leak. So what counts is the smallest figure
of each window of steps, and that it rose from each window to the next. Two figures are looked at:

- the number of allocations, which does not depend on the size of batches: three rises in a row;
- their bytes, for what grows without becoming more: five rises in a row, since five rises of
  figures without any order come by chance once
  in 720 windows, and at least the smallest segment that an allocator takes, 2 MiB.

There are at most 16 windows. When there are more, two neighbours become one and windows twice as
long from then on, so that a leak of one tensor in a thousand steps is seen as well as one of each
step, and a run of any length costs the same.

`is_leak` says when a rise is told. Nothing tells a buffer that fills up from a leak but time, so
time decides:

| what grows | it is told when |
|---|---|
| tensors that keep the graph that computed them, which no buffer does | it has lasted: through the end of an epoch; where epochs are not known, or the last one runs, 200 steps |
| other tensors | they fill the device before the training ends, and the growth has lasted; where the end is not known, they have taken half as much as is left |
| either | they fill the device before this epoch ends |

A list that is emptied at the end of each epoch, a dataset that is cached in the first one, and
detached losses of 512 bytes each are not told of.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from memcallback.core.units import MiB

_MOST_WINDOWS = 16
_RISES_OF_COUNT = 3
_RISES_OF_BYTES = 5
_LEAST_BYTES = 2 * MiB
#: Steps after which a rise has lasted where no epoch ends.
LASTING_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is; None for what is not known.

    Attributes:
        epoch: The epoch that runs, from 0.
        steps_left_in_epoch: Steps until it ends.
        steps_left: Steps until the training ends.
    """

    epoch: int | None = None
    steps_left_in_epoch: int | None = None
    steps_left: int | None = None

    @property
    def has_epoch_ends(self) -> bool:
        """Whether an epoch is known to end before the training does."""
        return self.steps_left_in_epoch is not None and (
            self.steps_left is None or self.steps_left_in_epoch < self.steps_left
        )


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Windows at the end of which each is above the one before.

    Attributes:
        first_step: The step with which the first of them begins.
        last_step: The step with which the last of them ends.
        grown_bytes: From the smallest of the first to the smallest of the last.
        num_epochs: In how many epochs they lie; None if epochs are not known.
        is_rising_in_epoch: Whether the rise inside the last of these epochs is a rise of its own.
    """

    first_step: int
    last_step: int
    grown_bytes: int
    num_epochs: int | None
    is_rising_in_epoch: bool

    @property
    def num_steps(self) -> int:
        """Steps from first to last."""
        return self.last_step - self.first_step + 1


@dataclass
class _Window:
    first_step: int
    last_step: int
    num_bytes: int
    count: int
    first_epoch: int | None
    last_epoch: int | None
    num_readings: int = 1

    def join(self, later: _Window) -> None:
        self.last_step, self.last_epoch = later.last_step, later.last_epoch
        self.num_bytes = min(self.num_bytes, later.num_bytes)
        self.count = min(self.count, later.count)
        self.num_readings += later.num_readings


class Growth:
    """The figures of one device, and whether they rise.

    Attributes:
        num_doublings: How often windows have become twice as long.
    """

    def __init__(self, readings_per_window: int, *, is_sparse: bool = False) -> None:
        self._size = readings_per_window
        self._is_sparse = is_sparse
        self.num_doublings = 0
        self._closed: list[_Window] = []
        self._open: _Window | None = None

    @property
    def is_at_edge(self) -> bool:
        """Whether the next reading is the first or the last of a window: only then its epoch
        counts.
        """
        return self._open is None or self._open.num_readings + 1 >= self._size

    def add(self, step: int, num_bytes: int, count: int, *, epoch: int | None = None) -> bool:
        """Take a reading."""
        reading = _Window(step, step, num_bytes, count, epoch, epoch)
        if self._open is None:
            self._open = reading
        else:
            self._open.join(reading)
        if self._open.num_readings < self._size:
            return False
        self._closed.append(self._open)
        self._open = None
        if len(self._closed) > _MOST_WINDOWS:
            # The oldest stays alone: in it is whatever the first steps do.
            for first, second in zip(self._closed[1::2], self._closed[2::2], strict=True):
                first.join(second)
            self._closed = [self._closed[0], *self._closed[1::2]]
            self.num_doublings += 1
            self._size *= 1 if self._is_sparse else 2
        return True

    @property
    def rise(self) -> Trend | None:
        """The rise that reaches to the last window; None if there is none that counts."""
        windows = _risen(self._closed)
        if not windows:
            return None
        first, last = windows[0], windows[-1]
        epochs = (
            None
            if first.first_epoch is None or last.last_epoch is None
            else last.last_epoch - first.first_epoch + 1
        )
        inside = [window for window in windows if window.first_epoch == last.last_epoch]
        return Trend(
            first_step=first.first_step,
            last_step=last.last_step,
            grown_bytes=last.num_bytes - first.num_bytes,
            num_epochs=epochs,
            is_rising_in_epoch=bool(_risen(inside)),
        )


def _risen(windows: list[_Window]) -> list[_Window]:
    """The last windows, if they have risen by enough of them."""
    by_count = _last_rising(windows, [window.count for window in windows])
    by_bytes = _last_rising(windows, [window.num_bytes for window in windows])
    if (
        len(by_bytes) <= _RISES_OF_BYTES
        or by_bytes[-1].num_bytes - by_bytes[0].num_bytes < _LEAST_BYTES
    ):
        by_bytes = []
    if len(by_count) <= _RISES_OF_COUNT:
        by_count = []
    return max(by_count, by_bytes, key=len)


def _last_rising(windows: list[_Window], figures: list[int]) -> list[_Window]:
    num_rises = 0
    for earlier, later in reversed(list(pairwise(figures))):
        if later <= earlier:
            break
        num_rises += 1
    return windows[len(windows) - num_rises - 1 :] if num_rises else []


def is_leak(
    rise: Trend,
    progress: Progress,
    *,
    keeps_graph: bool,
    bytes_per_step: float,
    free_bytes: int | None,
) -> bool:
    """Whether a rise is one to tell of, as the table above says."""
    steps_until_full = None if free_bytes is None else free_bytes / bytes_per_step
    if (
        steps_until_full is not None
        and progress.steps_left_in_epoch is not None
        and steps_until_full < progress.steps_left_in_epoch
    ):
        return True
    if not _has_lasted(rise, progress):
        return False
    if keeps_graph:
        return True
    if free_bytes is None or steps_until_full is None:
        return False
    if progress.steps_left is not None:
        return steps_until_full < progress.steps_left
    return rise.num_steps * bytes_per_step >= free_bytes / 2


def _has_lasted(rise: Trend, progress: Progress) -> bool:
    if rise.num_epochs is not None and (
        rise.num_epochs > 2 or (rise.num_epochs == 2 and rise.is_rising_in_epoch)
    ):
        return True
    return not progress.has_epoch_ends and rise.num_steps >= LASTING_STEPS
