"""The closing lines of a training: one, and more only for what has changed since the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memcallback.core.step_memory import StepMemory
from memcallback.core.types import Phase
from memcallback.core.units import brief_bytes
from memcallback.report.deviation import Deviation, is_compared
from memcallback.report.rank_values import RankValues
from memcallback.report.report import Report
from memcallback.report.styled import Letters, Line, Part, Style, labelled
from memcallback.report.verdict import differ, peak_of

#: Steps after the first report that speak for all others, where not all are read.
_ENOUGH = 5
_DEVIATES = "not as predicted"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is known of a whole training at its end.

    Attributes:
        num_steps: Optimizer updates.
        num_read: Those in steps that were read.
        num_read_since: Those of these after the first report.
        largest: The steady step with the largest peak; None if there was none.
        num_alloc_retries: Retries of the allocator; None if unknown.
        page: The page that was written; None if none was.
    """

    num_steps: int
    num_read: int
    num_read_since: int
    largest: StepMemory | None
    num_alloc_retries: int | None
    page: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough steps were read to speak for the others."""
        return self.num_read >= self.num_steps or self.num_read_since >= _ENOUGH


def closing_lines(
    first: Report | None, last: Report, ending: Ending, letters: Letters
) -> Iterator[Line]:
    """What has changed since the report that was shown first, if one was; then the ranks, notes."""
    parts = [f"{ending.num_steps:,} step{'' if ending.num_steps == 1 else 's'}"]
    changes = [] if first is None else list(_changes(first, last, letters))
    peak = peak_of(last.measured)
    larger = "" if peak is None else _larger(peak, ending.largest)
    if peak is not None:
        parts.append(f"peak {brief_bytes(peak[0])} {peak[1]}{larger}")
    is_same = first is not None and peak is not None and not (changes or larger)
    if is_same and ending.num_read_since and ending.is_known:
        parts.append("constant")
    deviation = last.deviation
    if is_compared(last.prediction, last.measured):
        agreement = _agreement(deviation)
        if ending.is_known or agreement == _DEVIATES:
            parts.append(agreement)
    if not ending.is_known:
        parts.append(f"{ending.num_read:,} of {ending.num_steps:,} steps read")
    if ending.num_alloc_retries is not None:
        number = ending.num_alloc_retries
        parts.append(f"{number:,} retr{'y' if number == 1 else 'ies'}" if number else "no retries")
    page = "" if ending.page is None else f"; page: {ending.page}"
    yield Part("memcallback", Style.BOLD), Part(f": {', '.join(parts)}{page}")
    if changes:
        yield from labelled("changed", [", ".join(changes)], Style.BAD)
    if first is not None and deviation is not None and not _is_known(deviation, first):
        yield from labelled("prediction", [deviation.sentence()], Style.BAD)
    if last.ranks is not None:
        yield from labelled("ranks", [_ranks(last.ranks, letters)])
    if first is not None:
        yield from labelled("note", [note for note in last.notes if note not in first.notes])


def _agreement(deviation: Deviation | None) -> str:
    """Whether the training went as predicted."""
    if deviation is None:
        return "as predicted"
    if deviation.is_of_measurement:
        return f"as predicted, but {deviation.reason}"
    return _DEVIATES


def _is_known(deviation: Deviation, report: Report) -> bool:
    """Whether a report has said that this value is off."""
    return report.deviation is not None and report.deviation.where == deviation.where


def _larger(typical: tuple[int, str], largest: StepMemory | None) -> str:
    """The largest peak, if it is another than that of a typical step."""
    peak = peak_of(largest)
    if largest is None or peak is None or peak[1] != typical[1] or not differ(typical[0], peak[0]):
        return ""
    return f" ({brief_bytes(peak[0])} in batch {(largest.index or 0) + 1:,})"


def _changes(first: Report, last: Report, letters: Letters) -> Iterator[str]:
    """What the last typical step has else than the one that was reported."""
    before, after = first.measured, last.measured
    if before is None or after is None or before.is_warm_up != after.is_warm_up:
        return
    if before.batch_size and after.batch_size and before.batch_size != after.batch_size:
        yield f"batch size {before.batch_size:,} {letters.to} {after.batch_size:,}"
    for phase in Phase:
        ours, theirs = before.phases.get(phase), after.phases.get(phase)
        if ours and theirs:
            yield from _change(
                f"peak of {theirs.label}",
                ours.peak_allocated_bytes,
                theirs.peak_allocated_bytes,
                letters,
            )
    yield from _change(
        "reserved peak", before.peak_reserved_bytes, after.peak_reserved_bytes, letters
    )


def _change(name: str, before: int | None, after: int | None, letters: Letters) -> Iterator[str]:
    if before is not None and after is not None and differ(before, after):
        yield f"{name} {brief_bytes(before)} {letters.to} {brief_bytes(after)}"


def _ranks(ranks: RankValues, letters: Letters) -> str:
    """The range over the ranks, and the worst rank."""
    spread, counts = ranks.peak_reserved, "reserved"
    if spread is None:
        spread, counts = ranks.peak_allocated, "allocated"
    numbers = [point.rank for point in ranks.points]
    name = f"{min(numbers)}-{max(numbers)}"
    worst = ranks.worst
    share = worst.capacity_share_pct
    usage = "" if share is None else f" ({share:.1f} % of its capacity)"
    sizes = ""
    if spread is not None:
        low, high = brief_bytes(spread.min_bytes), brief_bytes(spread.max_bytes)
        sizes = f"{low} {letters.until} {high} {counts}, " if low != high else f"{low} {counts}, "
    missing = f"; {len(ranks.missing)} of {ranks.num_ranks} sent no values" if ranks.missing else ""
    return f"{name}: {sizes}worst rank {worst.rank}{usage}{missing}"
