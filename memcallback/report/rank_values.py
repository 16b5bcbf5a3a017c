"""RankValues: memory of the ranks of a job at one step, as statistics and by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memcallback.core.document import Document, Printable, Table, size_text
from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase

_INDENT = "  "


@dataclass(frozen=True, kw_only=True)
class RankPoint:
    """Memory of one rank in its largest step since its last point; None where unknown.

    Attributes:
        rank: The rank.
        number: The step or update under which the rank logs the point.
        phases: Peak of allocated memory in each phase, measured.
        predicted: The same, predicted for this rank's step at its batch size.
        peak_allocated_bytes: Peak of allocated memory in the step.
        peak_reserved_bytes: Peak of reserved memory (accelerators).
        predicted_reserved_bytes: The same, predicted.
        capacity_bytes: The memory that this rank may use.
        place: The device and the machine, for people.
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
        """The peak that counts against the capacity: reserved, else allocated; 0 if unknown."""
        return self.peak_reserved_bytes or self.peak_allocated_bytes or 0

    @property
    def capacity_share_pct(self) -> float | None:
        """The share of its capacity that the rank used at its peak, in percent; None if unknown."""
        return 100 * self.peak_bytes / self.capacity_bytes if self.capacity_bytes else None


def point_of(
    step: StepMemory,
    predicted: StepMemory | None,
    *,
    rank: int,
    number: int,
    capacity_bytes: int | None = None,
    place: str = "",
) -> RankPoint:
    """The point of a rank for its measured and its predicted step."""
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
    return {
        phase: memory.peak_allocated_bytes
        for phase, memory in step.phases.items()
        if memory.peak_allocated_bytes is not None
    }


class Spread(NamedTuple):
    """A size over the ranks for which it is known; the mean is rounded down."""

    min_bytes: int
    mean_bytes: int
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankValues(Printable):
    """Memory of the ranks of a job at one step.

    Attributes:
        number: The step of rank zero; other ranks have their last point at or before it.
        points: The points, by rank; at least one.
        num_ranks: How many ranks the job has.
    """

    number: int
    points: tuple[RankPoint, ...]
    num_ranks: int

    @property
    def worst(self) -> RankPoint:
        """The rank with the largest share of its capacity in use, else with the largest peak."""
        if any(point.capacity_share_pct is None for point in self.points):
            return max(self.points, key=lambda point: (point.peak_bytes, -point.rank))
        return max(self.points, key=lambda point: (point.capacity_share_pct or 0.0, -point.rank))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that sent no values."""
        return tuple(sorted(set(range(self.num_ranks)) - {point.rank for point in self.points}))

    @property
    def peak_allocated(self) -> Spread | None:
        """Peak of allocated memory over the ranks; None if no rank knows it."""
        return _spread(point.peak_allocated_bytes for point in self.points)

    @property
    def peak_reserved(self) -> Spread | None:
        """Peak of reserved memory over the ranks; None if no rank knows it."""
        return _spread(point.peak_reserved_bytes for point in self.points)

    def of_phase(self, phase: Phase) -> Spread | None:
        """Peak of allocated memory in a phase over the ranks; None if no rank knows it."""
        return _spread(point.phases.get(phase) for point in self.points)

    def table(self) -> Table:
        """Each size over the ranks, and that of the worst rank beside its prediction."""
        worst = self.worst
        peaks = [
            _row(
                _INDENT + phase.label,
                self.of_phase(phase),
                worst.phases.get(phase),
                worst.predicted.get(phase),
            )
            for phase in Phase
        ]
        device = [
            _row(
                "peak reserved",
                self.peak_reserved,
                worst.peak_reserved_bytes,
                worst.predicted_reserved_bytes,
            ),
            self._share_row(),
        ]
        rows = [
            ("peak allocated", "", "", "", "", ""),
            *(row for row in (*peaks, *device) if any(row[1:])),
        ]
        of_all = f" of {self.num_ranks}" if self.missing else ""
        title = f"Memory over {len(self.points)}{of_all} ranks, step {self.number}, measured"
        columns = (
            "",
            "minimum",
            "mean",
            "maximum",
            f"rank {worst.rank}",
            *(["predicted for it"] if worst.predicted else []),
        )
        return Table(title=title, columns=columns, rows=tuple(row[: len(columns)] for row in rows))

    def _share_row(self) -> tuple[str, ...]:
        shares = [
            point.capacity_share_pct
            for point in self.points
            if point.capacity_share_pct is not None
        ]
        known = (
            (min(shares), sum(shares) / len(shares), max(shares), self.worst.capacity_share_pct)
            if shares
            else ()
        )
        cells = [f"{share:.1f} %" if share is not None else "" for share in known]
        return ("share of its capacity", *cells, *[""] * (5 - len(cells)))

    def lines(self) -> tuple[str, ...]:
        """Which rank is the worst, and which ranks sent no values."""
        worst = self.worst
        share = worst.capacity_share_pct
        usage = (
            "took most memory"
            if share is None
            else f"is nearest to its capacity, {share:.1f} % at its peak"
        )
        lines = [f"Rank {worst.rank}{f' ({worst.place})' if worst.place else ''} {usage}."]
        if self.missing:
            lines.append(
                f"No values for this step from {_ranks(self.missing)}: "
                "not recorded there, late, or lost."
            )
        return tuple(lines)

    def document(self) -> Document:
        """The table, and which rank is the worst."""
        return Document(self.table(), *self.lines())


def _spread(sizes: Iterable[int | None]) -> Spread | None:
    known = [size for size in sizes if size is not None]
    return Spread(min(known), sum(known) // len(known), max(known)) if known else None


def _row(
    label: str, spread: Spread | None, worst: int | None, predicted: int | None
) -> tuple[str, ...]:
    sizes = (*(spread or (None, None, None)), worst, predicted)
    return (label, *(size_text(size, "") for size in sizes))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
