"""Detects memory that keeps growing, from the bytes and allocations in use after each step.

Memory after a step rises and falls with the batch size. It rises in the first steps (optimizer
state, workspaces), until a buffer or cache is full, and it falls at the end of an epoch. None of
that is a leak. So we take the minimum over a window of steps, and require that it rises from each
window to the next. We look at two series:

- the number of allocations, which does not depend on the batch size: three rises in a row;
- the bytes, for something that grows in place: five rises in a row and at least 2 MiB, the smallest
  segment an allocator requests. In a random series five rises in a row come once in 720 windows.

At most 16 windows are kept. Then pairs of windows are merged and new windows are twice as long. So
a leak of one tensor per thousand steps is found like one per step, and long runs cost no more.

`is_leak` decides when to warn. A buffer being filled looks like a leak until it is full, so we
wait:

- For tensors that keep their graph, which no buffer does, until the growth has lasted: past the end
  of an epoch, or 200 steps if epochs are unknown or this is the last one.
- For other tensors, until the growth has lasted and they will fill the device before training ends;
  if the end is unknown, until they have grown by half of the free memory.
- We warn of both at once if they will fill the device before this epoch ends.

So there is no warning for a list that is emptied after each epoch, a dataset cached during the
first epoch, or detached losses of 512 bytes each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from memcallback.core.units import MiB

_MAX_WINDOWS = 16
_MIN_RISES_OF_COUNT = 3
_MIN_RISES_OF_BYTES = 5
_MIN_GROWTH_BYTES = 2 * MiB
#: Growth over this many steps has lasted if no epoch ends before.
LASTING_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is; None for unknown values.

    Attributes:
        epoch: The current epoch, from 0.
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
    """The latest windows, each above the one before.

    Attributes:
        first_step: The first step of the first window.
        last_step: The last step of the last window.
        grown_bytes: The rise of the bytes from the first to the last window.
        num_epochs: The number of epochs they span; None if unknown.
        is_rising_in_epoch: Whether the windows in the last of these epochs are a trend by
            themselves.
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
class TrendWindow:
    """A window of steps with the minimum of both series."""

    first_step: int
    last_step: int
    num_bytes: int
    count: int
    first_epoch: int | None
    last_epoch: int | None
    num_readings: int = 1

    def merge(self, later: TrendWindow) -> None:
        """Extend this window by the next one."""
        self.last_step, self.last_epoch = later.last_step, later.last_epoch
        self.num_bytes = min(self.num_bytes, later.num_bytes)
        self.count = min(self.count, later.count)
        self.num_readings += later.num_readings


class Growth:
    """Collects readings of one device into windows and finds their trend.

    With `is_sparse` the caller spaces its readings itself as `num_doublings` grows; otherwise
    windows become longer.
    """

    def __init__(self, readings_per_window: int, *, is_sparse: bool = False) -> None:
        self._size = readings_per_window
        self._is_sparse = is_sparse
        #: How often the length of a window has doubled.
        self.num_doublings = 0
        self._closed: list[TrendWindow] = []
        self._open: TrendWindow | None = None

    @property
    def is_at_edge(self) -> bool:
        """Whether the next reading starts or ends a window; its epoch is needed only then."""
        return self._open is None or self._open.num_readings + 1 >= self._size

    def add(self, step: int, num_bytes: int, count: int, *, epoch: int | None = None) -> bool:
        """Add a reading; return whether it closed a window."""
        reading = TrendWindow(step, step, num_bytes, count, epoch, epoch)
        if self._open is None:
            self._open = reading
        else:
            self._open.merge(reading)
        if self._open.num_readings < self._size:
            return False
        self._closed.append(self._open)
        self._open = None
        if len(self._closed) > _MAX_WINDOWS:
            # The oldest stays as it is, because it holds the unusual first steps.
            for first, second in zip(self._closed[1::2], self._closed[2::2], strict=True):
                first.merge(second)
            self._closed = [self._closed[0], *self._closed[1::2]]
            self.num_doublings += 1
            self._size *= 1 if self._is_sparse else 2
        return True

    @property
    def rise(self) -> Trend | None:
        """The rise that is still going on in the last window; None without one."""
        windows = _rising(self._closed)
        if not windows:
            return None
        first, last = windows[0], windows[-1]
        num_epochs = None
        if first.first_epoch is not None and last.last_epoch is not None:
            num_epochs = last.last_epoch - first.first_epoch + 1
        in_last_epoch = [window for window in windows if window.first_epoch == last.last_epoch]
        return Trend(
            first_step=first.first_step,
            last_step=last.last_step,
            grown_bytes=last.num_bytes - first.num_bytes,
            num_epochs=num_epochs,
            is_rising_in_epoch=bool(_rising(in_last_epoch)),
        )


def _rising(windows: list[TrendWindow]) -> list[TrendWindow]:
    """The last windows if either series rises often enough; empty otherwise."""
    by_count = _last_rising(windows, [window.count for window in windows])
    if len(by_count) <= _MIN_RISES_OF_COUNT:
        by_count = []
    by_bytes = _last_rising(windows, [window.num_bytes for window in windows])
    if (
        len(by_bytes) <= _MIN_RISES_OF_BYTES
        or by_bytes[-1].num_bytes - by_bytes[0].num_bytes < _MIN_GROWTH_BYTES
    ):
        by_bytes = []
    return max(by_count, by_bytes, key=len)


def _last_rising(windows: list[TrendWindow], values: list[int]) -> list[TrendWindow]:
    """The last windows between which the values rise without interruption."""
    num_rises = 0
    for earlier, later in reversed(list(pairwise(values))):
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
    """Decide whether to warn of a rise, by the table above."""
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
    """Whether a rise went past the end of an epoch, or long enough if no epoch ends."""
    if rise.num_epochs is not None and (
        rise.num_epochs > 2 or (rise.num_epochs == 2 and rise.is_rising_in_epoch)
    ):
        return True
    return not progress.has_epoch_ends and rise.num_steps >= LASTING_STEPS
