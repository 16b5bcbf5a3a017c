"""Plan: the what-if table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from memcallback.core.document import (
    Block,
    Code,
    Document,
    Heading,
    Paragraph,
    Printable,
    Table,
    size_text,
)
from memcallback.core.units import format_bytes

#: What is less than this share of the peak or of the largest batch, in percent, is no help.
_NOTABLE_PCT = 1.0
#: Of the savings with which a batch fits at all.
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A training step with a saving, predicted.

    Attributes:
        saving: The saving, or several joined by ` + `.
        kind: What it changes, such as `precision` or `checkpointing`; of several, joined as they
            are.
        batch_size: Samples in one forward pass; as many samples as without the saving come between
            two updates.
        peak_allocated_bytes: The largest allocated figure of the steady step; None if the step
            could not be predicted.
        peak_reserved_bytes: The same of reserved memory; None too on a CPU.
        largest_batch_size: The most samples in one forward pass that are sure to fit, with the
            headroom; 0 if not one is; None if unknown.
        extra_compute_pct: Floating-point operations per sample beyond those without the saving, in
            percent of them, by PyTorch's own formulas (torch.utils.flop_counter); None if it counts
            none.
        sent_bytes: What a rank sends to others from one update to the next, by the formulas of
            rings; 0 on one device.
        changes: What it changes in the numbers that come out.
        line: What to write in a program to have it.
        problem: Why it could not be predicted, or does not work with this model; empty if it does.
        fits: Whether it was predicted to fit the device; None if it could not be predicted.
    """

    saving: str
    kind: str = ""
    batch_size: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    largest_batch_size: int | None = None
    extra_compute_pct: float | None = None
    sent_bytes: int = 0
    changes: str = ""
    line: str = ""
    problem: str = ""
    fits: bool | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The peak that must fit: of reserved memory, on a CPU of allocated memory."""
        return (
            self.peak_allocated_bytes
            if self.peak_reserved_bytes is None
            else self.peak_reserved_bytes
        )

    @property
    def rank(self) -> tuple[int, int, float]:
        """The smaller, the better: by the largest batch size where that is known, then by the peak,
        then by the computation.
        """
        return -(self.largest_batch_size or 0), self.peak_bytes or 0, self.extra_compute_pct or 0.0


@dataclass(frozen=True, kw_only=True)
class Plan(Printable):
    """A training step as it is and with each saving.

    Attributes:
        current: The step as it is.
        tried: The same with savings, in the order in which they were tried.
        device_name: The device.
        capacity_bytes: Its memory; None if unknown.
        headroom: The fraction of it that the largest batch sizes leave free.
        outside_bytes: What others than this process's allocator use of it; None if that is not
            known, and the device's context is left free.
        caveats: What was assumed of the step as it is.
    """

    current: PlanRow
    tried: tuple[PlanRow, ...]
    device_name: str
    capacity_bytes: int | None
    headroom: float
    outside_bytes: int | None = None
    caveats: tuple[str, ...] = ()

    def helps(self, row: PlanRow) -> bool:
        """Whether the peak is smaller with it, or the largest batch is larger, by 1 % at least."""
        if row.problem or row is self.current:
            return False
        return self._has_smaller_peak(row) or self._has_larger_batch(row)

    def _has_smaller_peak(self, row: PlanRow) -> bool:
        saved_pct = self.saved_pct(row)
        return saved_pct is not None and saved_pct >= _NOTABLE_PCT

    def _has_larger_batch(self, row: PlanRow) -> bool:
        here, there = self.current.largest_batch_size, row.largest_batch_size
        return (
            here is not None
            and there is not None
            and there > here
            and 100 * (there - here) >= _NOTABLE_PCT * here
        )

    @cached_property
    def best_checkpointing(self) -> PlanRow | None:
        """Of several ways to checkpoint, the one with the largest batch, then with the smallest
        peak; None if not several help.
        """
        rows = [row for row in self.tried if row.kind == "checkpointing" and self.helps(row)]
        return min(rows, key=lambda row: row.rank) if len(rows) > 1 else None

    def name_of(self, row: PlanRow) -> str:
        """The saving, with a mark at the best way to checkpoint."""
        return f"{row.saving} (best)" if row is self.best_checkpointing else row.saving

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """Those that help, the smallest peak first; then those that do not; then those that do not
        work.
        """
        return tuple(
            sorted(
                self.tried,
                key=lambda row: (bool(row.problem), not self.helps(row), row.peak_bytes or 0),
            )
        )

    def saved_pct(self, row: PlanRow) -> float | None:
        """How much smaller the peak is, in percent of the present one; negative if it is larger."""
        if row.peak_bytes is None or not self.current.peak_bytes:
            return None
        return 100 * (1 - row.peak_bytes / self.current.peak_bytes)

    def to_table(self) -> Table:
        """One row for each saving that was predicted, the step as it is first."""
        known = [row for row in self.rows if not row.problem]
        num_helping = sum(map(self.helps, known))
        capacity = "" if self.capacity_bytes is None else format_bytes(self.capacity_bytes)
        # A card that was given by its size is named by it.
        size = f" of {capacity}" if capacity and not self.device_name.endswith(capacity) else ""
        room = f"{size}, {100 * self.headroom:g}% kept free" if capacity else ""
        room += (
            ""
            if self.outside_bytes is None
            else f", {format_bytes(self.outside_bytes)} in use outside the allocator"
        )
        return Table(
            title=f"What savings would buy (batch size {self.current.batch_size}) on {self.device_name}{room}\npredicted, each by a trace of its own",
            columns=(
                "saving",
                "peak allocated",
                "peak reserved",
                "saved",
                "largest batch",
                "extra compute",
                *self._sent_column(),
            ),
            rows=tuple(self._cells(row) for row in (self.current, *known)),
            rules_after=frozenset({0, num_helping} if num_helping else {0}),
        )

    def _sent_column(self) -> tuple[str, ...]:
        """Where several ranks were tried."""
        return ("sent",) if any(row.sent_bytes for row in self.tried) else ()

    def _cells(self, row: PlanRow) -> tuple[str, ...]:
        saved, extra = self.saved_pct(row), row.extra_compute_pct
        verdict = (
            f"{saved:.1f} %"
            if self._has_smaller_peak(row)
            else "larger batch"
            if self.helps(row)
            else "does not help"
        )
        return (
            self.name_of(row),
            size_text(row.peak_allocated_bytes, ""),
            size_text(row.peak_reserved_bytes, ""),
            "" if row is self.current else verdict,
            "?" if row.largest_batch_size is None else f"{row.largest_batch_size:,}",
            "" if row is self.current or extra is None else f"{extra + 0:.1f} %",
            *(size_text(row.sent_bytes or None, "") for _ in self._sent_column()),
        )

    def _notes(self) -> tuple[tuple[str, Sequence[PlanRow]], ...]:
        helping = [row for row in self.rows if self.helps(row) and " + " not in row.saving]
        return (
            ("How to have them, and what they change:", helping),
            ("Not possible:", [row for row in self.rows if row.problem]),
        )

    def _if_nothing_fits(self) -> tuple[str, ...]:
        """Where the step as it is does not fit with one sample: with which savings it does, the
        best first.
        """
        if self.current.largest_batch_size != 0:
            return ()
        fitting = sorted(
            (row for row in self.tried if row.largest_batch_size), key=lambda row: row.rank
        )
        if not fitting:
            return ("Not even one sample is sure to fit, as it is or with any of these savings.",)
        named = [f"{row.saving} (up to {row.largest_batch_size:,})" for row in fitting[:_NUM_NAMED]]
        more = f" or {len(fitting) - _NUM_NAMED} more" if len(fitting) > _NUM_NAMED else ""
        return (
            f"As it is, not even one sample is sure to fit. A batch fits with {' or '.join(named)}{more}.",
        )

    def document(self) -> Document:
        """The table, how to have each saving, and what was assumed."""
        blocks: list[Block | str] = [self.to_table(), *self._if_nothing_fits()]
        for title, rows in self._notes():
            if rows:
                blocks.append(Heading(title))
            for row in rows:
                blocks.append(Paragraph(f"{self.name_of(row)}: {row.problem or row.changes}", 1))
                if not row.problem:
                    blocks.append(Code(row.line, 2))
        return Document(*blocks, *self.caveats)

    def to_dict(self) -> dict[str, Any]:
        """Data that json writes, with the unit in every key."""
        return {
            "device_name": self.device_name,
            "capacity_bytes": self.capacity_bytes,
            "headroom_pct": 100 * self.headroom,
            "outside_bytes": self.outside_bytes,
            "current": asdict(self.current),
            "savings": [
                {
                    **asdict(row),
                    "helps": self.helps(row),
                    "is_best_checkpointing": row is self.best_checkpointing,
                    "saved_pct": self.saved_pct(row),
                }
                for row in self.rows
            ],
            "caveats": list(self.caveats),
        }
