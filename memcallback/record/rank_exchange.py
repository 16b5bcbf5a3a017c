"""Sends the peaks of all ranks to rank zero, and matches them to its steps.

We use no collective. A collective that only one rank calls, or in another order than the program's
own, is a deadlock; and ranks do log at different steps, fail, or train without the callback. Even
making a process group is a collective. But the ranks share a key-value store (the TCPStore of their
rendezvous): a rank sets a value and does not wait, and rank zero reads what has arrived. So points
arrive late, out of step, or not at all, and `RankPoints` matches them.

A thread does this over its own connection. If the process with the store is dead, a call fails at
once; but if it is stopped, a read hangs, and on the program's connection would block the program.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from memcallback.core.interruptions import PassOver
from memcallback.core.types import Phase
from memcallback.report.rank_values import RankPoint, RankValues

#: A message repeats the last points that fit, in case rank zero did not read the one before.
MAX_MESSAGE_BYTES = 1024
NUM_POINTS_IN_MESSAGE = 4
#: How long a step waits for other ranks' points; then it is shown without them.
PATIENCE_S = 10.0
#: Points kept of each rank.
_NUM_KEPT = 64
#: Pause of rank zero between two reads for missing points: the first, doubled each time, and the
#: longest.
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
#: Timeout for the last points at the end of a training.
_LONGEST_END_S = 1.0
_CONNECT_S = 10
#: Each training of a process has its own keys; all ranks begin them in the same order.
_numbers = itertools.count()


def rank_here() -> int | None:
    """The rank of this process; None in a job of one process."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank() if distributed.get_world_size() > 1 else None


def num_ranks_here() -> int:
    """The number of ranks of this job."""
    return 1 if rank_here() is None else torch.distributed.get_world_size()


class RankExchange:
    """Sends this rank's points, and on rank zero receives those of the others.

    Only `end` waits for other ranks, for a second at most.

    Attributes:
        problem: Why points do not arrive, or no longer; None if nothing is wrong.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.problem: str | None = None
        self._last: deque[RankPoint] = deque(maxlen=NUM_POINTS_IN_MESSAGE)
        self._points = RankPoints(num_ranks)
        self._changed = threading.Condition()
        #: The message to send; the first one only announces this rank.
        self._message: str | None = RankMessage(rank=rank).to_json() if rank else None
        #: On rank zero the time to the next read: 0 for at once, None if no point is missing.
        self._pause_s: float | None = None
        self._is_ending = self._is_closed = False
        number, attempt = next(_numbers), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        address = _address()
        if address is None:
            self.problem = (
                "the ranks have no TCPStore in common; start them with torchrun, or with an "
                "init_method of env:// or tcp://"
            )
            return
        self._thread = threading.Thread(
            target=self._run,
            args=(*address, f"memcallback/{attempt}/{number}"),
            name="memcallback ranks",
            daemon=True,
        )
        self._thread.start()
        # The interpreter must not shut down while the thread runs.
        atexit.register(self._stop)

    @classmethod
    def of_job(cls) -> RankExchange | None:
        """The exchange of this process's job; None for a job of one process."""
        rank = rank_here()
        return None if rank is None else cls(rank, torch.distributed.get_world_size())

    def send(self, point: RankPoint) -> None:
        """Send a point of this rank."""
        with self._changed:
            if self.rank == 0:
                self._points.take_own(point, time.monotonic())
                self._pause_s = 0.0
            else:
                self._last.append(point)
                self._message = RankMessage(rank=self.rank, points=tuple(self._last)).to_json()
            self._changed.notify_all()

    def ready(self) -> list[RankValues]:
        """On rank zero, the steps completed since the last call (see `RankPoints.ready`)."""
        if not self._points.is_waiting:
            return []
        with self._changed:
            return self._points.ready(time.monotonic())

    def end(self) -> list[RankValues]:
        """End this rank's training; rank zero waits for the last points, for at most a second.

        It does not wait while an exception propagates.
        """
        is_failing = sys.exc_info()[1] is not None
        with self._changed:
            self._is_ending = True
            if self.rank == 0:
                self._pause_s = 0.0
            else:
                self._message = RankMessage(
                    rank=self.rank, points=tuple(self._last), has_ended=True
                ).to_json()
            self._changed.notify_all()
            if not is_failing:
                self._changed.wait_for(self._has_all, _LONGEST_END_S)
            return self._points.ready(time.monotonic(), is_over=not is_failing)

    def close(self) -> None:
        """Stop sending and reading."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_all(self) -> bool:
        """Whether all is sent, and on rank zero all has arrived."""
        return self.problem is not None or (self._message is None and self._pause_s is None)

    def _stop(self) -> None:
        self.close()
        self._thread.join(_LONGEST_END_S)

    # In the thread.

    def _run(self, host: str, port: int, prefix: str) -> None:
        try:
            self._exchange(_connected(host, port, prefix))
        except Exception as error:  # the process with the store is gone: the job is ending
            text = str(error).splitlines()
            with self._changed:
                self.problem = (
                    "the store of the ranks cannot be reached any more: "
                    f"{type(error).__name__}: {text[0] if text else ''}"
                )
                self._changed.notify_all()
        atexit.unregister(self._stop)

    def _exchange(self, store: Any) -> None:
        slot = str(store.add("num", 1)) if self.rank else None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._message or self._pause_s == 0 or self._is_closed, self._pause_s
                )
                message, is_last = self._message, self._is_closed
            if slot is None:
                self._read(store)
            elif message is not None:
                store.set(slot, message)
            with self._changed:
                if self._message is message:
                    self._message = None
                self._changed.notify_all()
                if is_last:
                    return

    def _read(self, store: Any) -> None:
        with self._changed:
            before_s, self._pause_s = self._pause_s or 0.0, _FIRST_PAUSE_S
        keys = [str(slot + 1) for slot in range(store.add("num", 0))]
        if keys and not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        messages = [RankMessage.from_json(text) for text in store.multi_get(keys)] if keys else []
        with self._changed:
            for message in messages:
                self._points.take(message)
            if not (self._points.running if self._is_ending else self._points.is_incomplete):
                self._pause_s = None
            elif self._pause_s and not self._is_ending:  # nothing was sent meanwhile
                self._pause_s = min(max(_FIRST_PAUSE_S, 2 * before_s), _LONGEST_PAUSE_S)


def _address() -> tuple[str, int] | None:
    """Host and port of the store of the rendezvous; None if it cannot be reached by network."""
    distributed: Any = torch.distributed
    store: Any = None
    with PassOver():  # a private function, and stores of others
        store = distributed.distributed_c10d._get_default_store()
        while isinstance(store, distributed.PrefixStore):
            store = store.underlying_store
    # We do not keep the store itself: that would keep the program's server alive.
    return (store.host, store.port) if isinstance(store, distributed.TCPStore) else None


def _connected(host: str, port: int, prefix: str) -> Any:
    distributed: Any = torch.distributed
    store = distributed.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
    )
    return distributed.PrefixStore(prefix, store)


def place_of(device_name: str) -> str:
    """The name of a device with that of this machine."""
    return f"{device_name} of {socket.gethostname()}"


@dataclass(frozen=True, kw_only=True)
class RankMessage:
    """A rank's last points, oldest first, and whether it has ended."""

    rank: int
    points: tuple[RankPoint, ...] = ()
    has_ended: bool = False

    def to_json(self) -> str:
        """As ASCII, with as many of the last points as fit into `MAX_MESSAGE_BYTES`."""
        place = self.points[-1].place[:100] if self.points else ""
        for first in range(max(0, len(self.points) - NUM_POINTS_IN_MESSAGE), len(self.points)):
            text = self._text(place, self.points[first:])
            if len(text) <= MAX_MESSAGE_BYTES:
                return text
        return self._text("", ())

    def _text(self, place: str, points: Sequence[RankPoint]) -> str:
        return json.dumps(
            [self.rank, place, self.has_ended, [_to_row(point) for point in points]],
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> RankMessage:
        """From `to_json`."""
        rank, place, has_ended, rows = json.loads(text)
        return cls(
            rank=rank,
            points=tuple(_from_row(rank, place, row) for row in rows),
            has_ended=has_ended,
        )


def _to_row(point: RankPoint) -> list[Any]:
    phases = [[peaks.get(phase) for phase in Phase] for peaks in (point.phases, point.predicted)]
    sizes = (
        point.peak_allocated_bytes,
        point.peak_reserved_bytes,
        point.predicted_reserved_bytes,
        point.capacity_bytes,
    )
    return [point.number, *phases, *sizes]


def _from_row(rank: int, place: str, row: Sequence[Any]) -> RankPoint:
    number, measured, predicted, *sizes = row
    allocated, reserved, predicted_reserved, capacity = sizes
    return RankPoint(
        rank=rank,
        number=number,
        phases=_of_phases(measured),
        predicted=_of_phases(predicted),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        predicted_reserved_bytes=predicted_reserved,
        capacity_bytes=capacity,
        place=place,
    )


def _of_phases(peaks: Sequence[int | None]) -> dict[Phase, int]:
    return {phase: peak for phase, peak in zip(Phase, peaks, strict=True) if peak is not None}


class RankPoints:
    """Matches the points of other ranks to the steps of rank zero, whenever they arrive."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._of_rank: dict[int, deque[RankPoint]] = {}
        #: Ranks that sent nothing in time, so they record nothing.
        self._absent: set[int] = set()
        self._ended: set[int] = set()
        self._waiting: dict[int, float] = {}

    def take_own(self, point: RankPoint, now_s: float) -> None:
        """Add a point of rank zero, and wait for the other ranks' values of its step."""
        self._keep(point)
        self._waiting.setdefault(point.number, now_s)

    def take(self, message: RankMessage) -> None:
        """Add the message of another rank."""
        self._of_rank.setdefault(message.rank, deque(maxlen=_NUM_KEPT))
        self._absent.discard(message.rank)
        for point in message.points:
            self._keep(point)
        if message.has_ended:
            self._ended.add(message.rank)

    def _keep(self, point: RankPoint) -> None:
        points = self._of_rank.setdefault(point.rank, deque(maxlen=_NUM_KEPT))
        while points and points[-1].number >= point.number:
            # Sent again, or logged again under the same number.
            points.pop()
        points.append(point)

    @property
    def is_waiting(self) -> bool:
        """Whether `ready` has not returned all steps yet."""
        return bool(self._waiting)

    @property
    def is_incomplete(self) -> bool:
        """Whether such a step waits for a point of another rank."""
        return bool(self._waiting) and bool(
            self._silent(max(self._waiting)) - self._ended - self._absent
        )

    @property
    def running(self) -> frozenset[int]:
        """The other ranks that have sent a message and have not ended."""
        return frozenset(self._of_rank) - self._ended - {0}

    def ready(self, now_s: float, *, is_over: bool = False) -> list[RankValues]:
        """The complete steps, each once, in order.

        A step is complete if each rank has ended or has a point at or after it.
        """
        steps = []
        for number, since_s in sorted(self._waiting.items()):
            silent = self._silent(number)
            if silent - self._ended - self._absent:
                if not is_over and now_s - since_s < PATIENCE_S:
                    break
                self._absent |= silent - set(self._of_rank)
            del self._waiting[number]
            # An older point of a silent rank does not belong to this step.
            points = [
                self._at(rank, number) for rank in range(self._num_ranks) if rank not in silent
            ]
            steps.append(
                RankValues(
                    number=number,
                    points=tuple(p for p in points if p is not None),
                    num_ranks=self._num_ranks,
                )
            )
        return [step for step in steps if len(step.points) > 1]

    def _silent(self, number: int) -> set[int]:
        """The ranks without a point at or after a step."""
        lasts = {rank: points[-1].number for rank, points in self._of_rank.items() if points}
        return {rank for rank in range(self._num_ranks) if lasts.get(rank, -1) < number}

    def _at(self, rank: int, number: int) -> RankPoint | None:
        return next(
            (point for point in reversed(self._of_rank[rank]) if point.number <= number), None
        )
