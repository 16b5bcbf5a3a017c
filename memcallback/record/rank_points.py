"""Match other ranks' points to rank zero's steps.

Nobody waits for what a rank tells. So it comes late, one by one, or never, and ranks may log at
different steps: `RankPoints` puts together what belongs to one step of rank zero.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memcallback.core.types import Phase
from memcallback.report.rank_values import RankPoint, RankValues

#: A message has as many points as there is room for, so that one that was not read in time is in
#: the next.
MAX_MESSAGE_BYTES = 1024
NUM_POINTS_IN_MESSAGE = 4
#: How long a step waits for the figures of others; then it is shown without those that are missing.
PATIENCE_S = 10.0
#: Points of a rank that are kept.
_NUM_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class RankMessage:
    """What a rank tells the others: its last points, oldest first, and whether it has ended.

    Attributes:
        rank: The rank.
        points: Its last points.
        has_ended: Whether no more come.
    """

    rank: int
    points: tuple[RankPoint, ...] = ()
    has_ended: bool = False

    def to_json(self) -> str:
        """At most `MAX_MESSAGE_BYTES` of ASCII, with as many of the last points as there is room
        for.
        """
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
    """Puts together the points of the ranks that belong to one step of rank zero, whenever they
    come.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._of_rank: dict[int, deque[RankPoint]] = {}
        #: Ranks that were not heard of in time: nothing is recorded there.
        self._absent: set[int] = set()
        self._ended: set[int] = set()
        self._waiting: dict[int, float] = {}

    def take_own(self, point: RankPoint, now_s: float) -> None:
        """A point of rank zero: figures over all ranks are wanted for its step."""
        self._keep(point)
        self._waiting.setdefault(point.number, now_s)

    def take(self, message: RankMessage) -> None:
        """What another rank told."""
        self._of_rank.setdefault(message.rank, deque(maxlen=_NUM_KEPT))
        self._absent.discard(message.rank)
        for point in message.points:
            self._keep(point)
        if message.has_ended:
            self._ended.add(message.rank)

    def _keep(self, point: RankPoint) -> None:
        points = self._of_rank.setdefault(point.rank, deque(maxlen=_NUM_KEPT))
        while points and points[-1].number >= point.number:
            # Told again, or logged again under the same number.
            points.pop()
        points.append(point)

    @property
    def is_waiting(self) -> bool:
        """Whether there is a step that was not given by `ready` yet."""
        return bool(self._waiting)

    @property
    def is_incomplete(self) -> bool:
        """Whether such a step waits for a point of another rank."""
        return bool(self._waiting) and bool(
            self._silent(max(self._waiting)) - self._ended - self._absent
        )

    @property
    def running(self) -> frozenset[int]:
        """The ranks besides rank zero that were heard of and have not ended."""
        return frozenset(self._of_rank) - self._ended - {0}

    def ready(self, now_s: float, *, is_over: bool = False) -> list[RankValues]:
        """The steps that are complete, each once, in order: each rank has ended, or has a point at
        or after them.
        """
        found = []
        for number, since_s in sorted(self._waiting.items()):
            silent = self._silent(number)
            if silent - self._ended - self._absent:
                if not is_over and now_s - since_s < PATIENCE_S:
                    break
                self._absent |= silent - set(self._of_rank)
            del self._waiting[number]
            # What a rank told that is silent now is old.
            points = [
                self._at(rank, number) for rank in range(self._num_ranks) if rank not in silent
            ]
            found.append(
                RankValues(
                    number=number,
                    points=tuple(p for p in points if p is not None),
                    num_ranks=self._num_ranks,
                )
            )
        return [figures for figures in found if len(figures.points) > 1]

    def _silent(self, number: int) -> set[int]:
        """The ranks without a point at or after a step."""
        lasts = {rank: points[-1].number for rank, points in self._of_rank.items() if points}
        return {rank for rank in range(self._num_ranks) if lasts.get(rank, -1) < number}

    def _at(self, rank: int, number: int) -> RankPoint | None:
        return next(
            (point for point in reversed(self._of_rank[rank]) if point.number <= number), None
        )
