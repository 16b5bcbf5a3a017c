"""step_page(): the page of a step, its sections in the order in which they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memcallback.core.document import Document
from memcallback.core.types import Category
from memcallback.core.units import brief_bytes
from memcallback.page.charts import CategoryBars, LineChart
from memcallback.page.page import Page, Section
from memcallback.page.timeline import Timeline
from memcallback.page.treemap import Node, Treemap


def step_page(
    title: str,
    verdict: Sequence[str],
    *,
    label: str,
    is_good: bool | None,
    timeline: Timeline,
    tree: Node,
    by_category: Mapping[Category, int],
    curve: LineChart | None,
    more: Sequence[Section] = (),
    caveats: Sequence[str] = (),
) -> Page:
    """The verdict, the step, its peak, the batch size, further sections, and what was assumed."""
    of_peak = Section(
        title="In memory at the peak",
        note=f"{brief_bytes(tree.num_bytes)}, by module and by category",
        parts=[Treemap(tree), CategoryBars(by_category)],
    )
    sections = [of_peak]
    if timeline.moments:  # a step that allocates nothing has none
        num_allocations = f"{timeline.num_allocations:,} allocations"
        note = f"{num_allocations} in order, stacked by category"
        sections = [Section(title=label, note=note, parts=[timeline]), of_peak]
    if curve is not None:
        sections.append(Section(title="Batch size", parts=[curve]))
    sections += more
    if caveats:
        sections.append(
            Section(title="What was assumed", parts=[Document(*caveats)], is_folded=True)
        )
    return Page(
        title=title,
        verdict=verdict,
        is_good=is_good,
        sections=sections,
    )
