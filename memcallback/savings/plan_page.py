"""savings_section(): savings as a section of a page, in groups by what they do to the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memcallback.core.units import brief_bytes
from memcallback.page.charts import Bar, Bars
from memcallback.page.page import Section
from memcallback.savings.plan import Plan, PlanRow, SavingGroup


def savings_section(present_bytes: int, rows: Iterable[PlanRow]) -> Section:
    """A bar for each saving, beside the present peak; those without a prediction have none."""
    predicted = [row for row in rows if row.peak_bytes is not None]
    groups = [
        (group.value, [_bar(row) for row in predicted if row.group == group])
        for group in SavingGroup
    ]
    return Section(
        title="What would save memory",
        note="the peak with each, predicted",
        parts=[Bars(groups=groups, present_bytes=present_bytes)],
    )


def plan_sections(plan: Plan | None) -> Iterator[Section]:
    """The savings of a plan that are shown; none without a plan."""
    if plan is not None and plan.current.peak_bytes is not None:
        yield savings_section(plan.current.peak_bytes, plan.shown)


def way_out(largest: int | None, rows: Iterable[PlanRow]) -> tuple[str, ...]:
    """What makes a step fit that does not: a batch size, or the mildest saving; one sentence."""
    ways = [f"batch size {largest:,}"] if largest else []
    order = list(SavingGroup)
    fitting = [row for row in rows if row.fits and row.peak_bytes is not None]
    if fitting:
        row = min(fitting, key=lambda one: order.index(one.group))
        ways.append(f"{row.saving} ({brief_bytes(row.peak_bytes or 0)}, {row.group.value})")
    return (f"To fit: {' or '.join(ways)}.",) if ways else ()


def _bar(row: PlanRow) -> Bar:
    return Bar(
        name=row.saving,
        num_bytes=row.peak_bytes or 0,
        note="; ".join(_notes(row)),
        line=row.line,
    )


def _notes(row: PlanRow) -> Iterator[str]:
    """Whether it fits or up to which batch, what it costs, and what it changes."""
    if row.largest_batch_size:
        yield f"fits up to {row.largest_batch_size:,}"
    elif row.largest_batch_size == 0:
        yield "not even one sample is sure to fit"
    elif row.fits is not None:
        yield "fits" if row.fits else "does not fit"
    extra = row.extra_compute_pct
    if extra is not None and abs(extra) >= 0.5:
        yield f"{extra:+.0f} % compute"
    if row.group is not SavingGroup.SAME_RESULT and row.changes:
        yield row.changes
