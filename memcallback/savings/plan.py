"""Plan: the what-if table, a step as it is and with each saving."""

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

#: A saving helps from this share of the peak, or of the largest batch size, in percent.
_NOTABLE_PCT = 1.0
#: Savings named in the sentence about a step that does not fit.
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A training step with a saving, predicted.

    Attributes:
        saving: The saving, or several joined by ` + `.
        kind: What it changes, such as `precision` or `checkpointing`; kinds of several savings are
            joined like their names.
        batch_size: Samples in one forward pass; the number between two updates is that without the
            saving.
        peak_allocated_bytes: Peak of allocated memory in the steady step; None if the step could
            not be predicted.
        peak_reserved_bytes: Peak of reserved memory; None also on a CPU.
        largest_batch_size: The most samples in one forward pass that are sure to fit with the
            headroom; 0 if not even one is; None if unknown.
        extra_compute_pct: Floating-point operations per sample beyond those without the saving, in
            percent, by PyTorch's formulas (torch.utils.flop_counter); None if it counts none.
        sent_bytes: Bytes that a rank sends between two updates, by the formulas of ring
            collectives; 0 on one device.
        changes: What it changes in the numbers that training computes.
        line: The line to paste into a program.
        problem: Why it could not be predicted, or does not work with this model; empty if it does.
        fits: Whether it is predicted to fit the device; None if it could not be predicted.
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
        reserved = self.peak_reserved_bytes
        return self.peak_allocated_bytes if reserved is None else reserved

    @property
    def rank(self) -> tuple[int, int, float]:
        """Sorts the best first: by largest batch size, then by peak, then by computation."""
        return -(self.largest_batch_size or 0), self.peak_bytes or 0, self.extra_compute_pct or 0.0


@dataclass(frozen=True, kw_only=True)
class Plan(Printable):
    """A training step as it is and with each saving.

    Attributes:
        current: The step as it is.
        tried: The step with savings, in the order in which they were tried.
        device_name: The device.
        capacity_bytes: Its memory; None if unknown.
        headroom: The fraction of it that the largest batch sizes keep free.
        outside_bytes: Bytes of it used outside this process's allocator; None if unknown, and the
            device's context is kept free.
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
        """The best of several ways to checkpoint that help; None if fewer than two do."""
        rows = [row for row in self.tried if row.kind == "checkpointing" and self.helps(row)]
        return min(rows, key=lambda row: row.rank) if len(rows) > 1 else None

    def name_of(self, row: PlanRow) -> str:
        """The saving; the best way to checkpoint is marked."""
        return f"{row.saving} (best)" if row is self.best_checkpointing else row.saving

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """Savings that help, smallest peak first; then those that do not; then those that fail."""

        def key(row: PlanRow) -> tuple[bool, bool, int]:
            return bool(row.problem), not self.helps(row), row.peak_bytes or 0

        return tuple(sorted(self.tried, key=key))

    def saved_pct(self, row: PlanRow) -> float | None:
        """By how much the peak falls, in percent of the present one; negative if it rises."""
        if row.peak_bytes is None or not self.current.peak_bytes:
            return None
        return 100 * (1 - row.peak_bytes / self.current.peak_bytes)

    def to_table(self) -> Table:
        """One row for each saving that was predicted, below the step as it is."""
        known = [row for row in self.rows if not row.problem]
        num_helping = sum(map(self.helps, known))
        return Table(
            title=f"What savings would buy (batch size {self.current.batch_size}) on "
            f"{self._device()}\npredicted, each by a trace of its own",
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

    def _device(self) -> str:
        """The device, its size, and the part of it that batches cannot have."""
        text = self.device_name
        if self.capacity_bytes is not None:
            capacity = format_bytes(self.capacity_bytes)
            # The name of a card given by its size ends with the size.
            text += "" if text.endswith(capacity) else f" of {capacity}"
            text += f", {100 * self.headroom:g}% kept free"
        if self.outside_bytes is not None:
            text += f", {format_bytes(self.outside_bytes)} in use outside the allocator"
        return text

    def _sent_column(self) -> tuple[str, ...]:
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
        """If not even one sample fits: the savings with which one does, the best first."""
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
            "As it is, not even one sample is sure to fit. "
            f"A batch fits with {' or '.join(named)}{more}.",
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
