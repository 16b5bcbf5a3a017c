"""What the ranks of a job took at about the same step: the range over them, and the one that is nearest to its capacity.

Each rank tells its own figures when it logs, and nobody waits for them. So they come late, one by one, or never, and ranks may log at different
steps: `RankPoints` puts together what belongs to one step of rank zero.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memcallback.events import Phase
from memcallback.stats import StepMemory
from memcallback.tables import Table
from memcallback.units import format_bytes

#: A message has as many points as there is room for, so that one that was not read in time is in the next.
MAX_MESSAGE_BYTES = 1024
NUM_POINTS_IN_MESSAGE = 4
#: How long a step waits for the figures of others; then it is shown without those that are missing.
PATIENCE_S = 10.0
#: Points of a rank that are kept.
_NUM_KEPT = 64
_INDENT = "  "


@dataclass(frozen=True, kw_only=True)
class RankPoint:
    """What one rank took in its largest step since its last point. All sizes in bytes, None where unknown.

    Attributes:
        rank: The rank.
        number: Of the point: the step or update under which the rank logs it.
        phases: The largest allocated figure of each phase, measured.
        predicted: The same, predicted for this rank's step at its batch size.
        peak_allocated_bytes: The largest allocated figure of the step.
        peak_reserved_bytes: The largest reserved figure (accelerators).
        predicted_reserved_bytes: The same, predicted.
        capacity_bytes: The memory that this rank plans for.
        place: The device and the machine, in words.
    """

    rank: int
    number: int
    phases: Mapping[Phase, int] = field(default_factory=dict)
    predicted: Mapping[Phase, int] = field(default_factory=dict)
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    place: str = ""

    @property
    def peak_bytes(self) -> int:
        """What counts against the capacity: reserved memory; allocated memory where nothing is reserved; 0 where neither is known."""
        return self.peak_reserved_bytes or self.peak_allocated_bytes or 0

    @property
    def capacity_share_pct(self) -> float | None:
        """The share of its capacity that the rank took at its peak, in percent; None if the capacity is unknown."""
        return 100 * self.peak_bytes / self.capacity_bytes if self.capacity_bytes else None


def point_of(
    step: StepMemory, predicted: StepMemory | None, *, rank: int, number: int, capacity_bytes: int | None = None, place: str = ""
) -> RankPoint:
    """The point of a rank.

    Args:
        step: A measured step.
        predicted: The predicted step at that step's batch size; None if there is none.
        rank: The rank.
        number: Of the point.
        capacity_bytes: The memory that the rank plans for; None if unknown.
        place: The device and the machine, in words.
    """
    return RankPoint(
        rank=rank,
        number=number,
        phases=_peaks(step),
        predicted=_peaks(predicted) if predicted else {},
        peak_allocated_bytes=step.peak_allocated_bytes,
        peak_reserved_bytes=step.peak_reserved_bytes,
        predicted_reserved_bytes=predicted.peak_reserved_bytes if predicted else None,
        capacity_bytes=capacity_bytes,
        place=place,
    )


def _peaks(step: StepMemory) -> dict[Phase, int]:
    return {phase: memory.peak_allocated_bytes for phase, memory in step.phases.items() if memory.peak_allocated_bytes is not None}


class Spread(NamedTuple):
    """One figure over the ranks of which it is known, in bytes; the mean is rounded down."""

    min_bytes: int
    mean_bytes: int
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The figures of the ranks of a job at one step.

    Attributes:
        number: The step of rank zero. Of another rank it is the last point at or before it.
        points: The points, by rank; at least one.
        num_ranks: How many ranks the job has.
    """

    number: int
    points: tuple[RankPoint, ...]
    num_ranks: int

    @property
    def worst(self) -> RankPoint:
        """The rank that took the largest share of its capacity; the lowest of several. Where a capacity is unknown, the largest peak counts."""
        if any(point.capacity_share_pct is None for point in self.points):
            return max(self.points, key=lambda point: (point.peak_bytes, -point.rank))
        return max(self.points, key=lambda point: (point.capacity_share_pct or 0.0, -point.rank))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of which no figures came."""
        return tuple(sorted(set(range(self.num_ranks)) - {point.rank for point in self.points}))

    @property
    def peak_allocated(self) -> Spread | None:
        """The largest allocated figure of the step over the ranks; None if no rank has it."""
        return _spread(point.peak_allocated_bytes for point in self.points)

    @property
    def peak_reserved(self) -> Spread | None:
        """The largest reserved figure of the step over the ranks; None if no rank has it."""
        return _spread(point.peak_reserved_bytes for point in self.points)

    def of_phase(self, phase: Phase) -> Spread | None:
        """The largest allocated figure of a phase over the ranks; None if no rank has it."""
        return _spread(point.phases.get(phase) for point in self.points)

    def table(self) -> Table:
        """The range over the ranks of each figure, and the worst rank's beside what was predicted for it."""
        worst = self.worst
        peaks = [_row(_INDENT + phase.label, self.of_phase(phase), worst.phases.get(phase), worst.predicted.get(phase)) for phase in Phase]
        device = [_row("peak reserved", self.peak_reserved, worst.peak_reserved_bytes, worst.predicted_reserved_bytes), self._share_row()]
        rows = [("peak allocated", "", "", "", "", ""), *(row for row in (*peaks, *device) if any(row[1:]))]
        of_all = f" of {self.num_ranks}" if self.missing else ""
        title = f"Memory over {len(self.points)}{of_all} ranks, step {self.number}, measured"
        columns = ("", "minimum", "mean", "maximum", f"rank {worst.rank}", *(["predicted for it"] if worst.predicted else []))
        return Table(title=title, columns=columns, rows=tuple(row[: len(columns)] for row in rows))

    def _share_row(self) -> tuple[str, ...]:
        shares = [point.capacity_share_pct for point in self.points if point.capacity_share_pct is not None]
        known = (min(shares), sum(shares) / len(shares), max(shares), self.worst.capacity_share_pct) if shares else ()
        cells = [f"{share:.1f} %" if share is not None else "" for share in known]
        return ("peak of its capacity", *cells, *[""] * (5 - len(cells)))

    def lines(self) -> tuple[str, ...]:
        """Which rank is the worst, and of which nothing is known."""
        worst = self.worst
        share = worst.capacity_share_pct
        near = f"took most of its capacity, {share:.1f} % at its peak" if share is not None else "took most"
        lines = [f"Rank {worst.rank}{f' ({worst.place})' if worst.place else ''} {near}."]
        if self.missing:
            lines.append(f"No figures came for this step from {_ranks(self.missing)}: not recorded there, late, or gone.")
        return tuple(lines)

    def to_text(self) -> str:
        """For a console."""
        return self.table().to_text() + "".join(f"{line}\n" for line in self.lines())

    def to_markdown(self) -> str:
        """For TensorBoard and files."""
        return "\n\n".join([self.table().to_markdown(), *self.lines()])


def _spread(figures: Iterable[int | None]) -> Spread | None:
    known = [figure for figure in figures if figure is not None]
    return Spread(min(known), sum(known) // len(known), max(known)) if known else None


def _row(label: str, spread: Spread | None, worst: int | None, predicted: int | None) -> tuple[str, ...]:
    return (label, *("" if size is None else format_bytes(size) for size in (*(spread or (None, None, None)), worst, predicted)))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


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
        """At most `MAX_MESSAGE_BYTES` of ASCII, with as many of the last points as there is room for."""
        place = self.points[-1].place[:100] if self.points else ""
        for first in range(max(0, len(self.points) - NUM_POINTS_IN_MESSAGE), len(self.points)):
            text = self._text(place, self.points[first:])
            if len(text) <= MAX_MESSAGE_BYTES:
                return text
        return self._text("", ())

    def _text(self, place: str, points: Sequence[RankPoint]) -> str:
        return json.dumps([self.rank, place, self.has_ended, [_to_row(point) for point in points]], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankMessage:
        """From `to_json`."""
        rank, place, has_ended, rows = json.loads(text)
        return cls(rank=rank, points=tuple(_from_row(rank, place, row) for row in rows), has_ended=has_ended)


def _to_row(point: RankPoint) -> list[Any]:
    phases = [[peaks.get(phase) for phase in Phase] for peaks in (point.phases, point.predicted)]
    sizes = (point.peak_allocated_bytes, point.peak_reserved_bytes, point.predicted_reserved_bytes, point.capacity_bytes)
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
    """Puts together the points of the ranks that belong to one step of rank zero, whenever they come.

    Args:
        num_ranks: How many ranks the job has.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._of_rank: dict[int, deque[RankPoint]] = {}
        #: Ranks that were not heard of in time: nothing is recorded there.
        self._absent: set[int] = set()
        self._ended: set[int] = set()
        self._waiting: dict[int, float] = {}

    def take_own(self, point: RankPoint, now_s: float) -> None:
        """A point of rank zero: figures over all ranks are wanted for its step.

        Args:
            point: The point.
            now_s: The time, by any clock that does not go backwards.
        """
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
        return bool(self._waiting) and bool(self._silent(max(self._waiting)) - self._ended - self._absent)

    @property
    def running(self) -> frozenset[int]:
        """The ranks besides rank zero that were heard of and have not ended."""
        return frozenset(self._of_rank) - self._ended - {0}

    def ready(self, now_s: float, *, is_over: bool = False) -> list[RankFigures]:
        """The steps that are complete, each once, in order: each rank has ended, or has a point at or after them.

        Args:
            now_s: The time, as for `take_own`: a step that has waited for `PATIENCE_S` is shown without the ranks that are missing.
            is_over: Nothing more comes: no step waits any longer.

        Returns:
            The steps for which at least two ranks have figures.
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
            points = [self._at(rank, number) for rank in range(self._num_ranks) if rank not in silent]
            found.append(RankFigures(number=number, points=tuple(p for p in points if p is not None), num_ranks=self._num_ranks))
        return [figures for figures in found if len(figures.points) > 1]

    def _silent(self, number: int) -> set[int]:
        """The ranks without a point at or after a step."""
        lasts = {rank: points[-1].number for rank, points in self._of_rank.items() if points}
        return {rank for rank in range(self._num_ranks) if lasts.get(rank, -1) < number}

    def _at(self, rank: int, number: int) -> RankPoint | None:
        return next((point for point in reversed(self._of_rank[rank]) if point.number <= number), None)
