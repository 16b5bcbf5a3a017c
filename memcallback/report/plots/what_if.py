"""what_if_bars(): the peak with each single saving that helps, in groups by what it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcallback.core.units import brief_bytes
from memcallback.report.plots.canvas import (
    GOOD_COLOUR,
    REST_COLOUR,
    SMALL_LETTERS,
    TEXT_COLOUR,
    Canvas,
    shortened,
)
from memcallback.savings.plan import Plan, PlanRow, SavingGroup

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NUM_LETTERS = 24


def what_if_bars(plan: Plan) -> npt.NDArray[np.uint8]:
    """The step as it is, then the savings that help, with what they cost.

    Combinations have names too long for a picture; the text has them.
    """
    shown = [row for row in plan.shown if not row.is_several]
    longest = max(1, *(row.peak_bytes or 0 for row in (plan.current, *shown)))
    kind = "allocated" if plan.current.peak_reserved_bytes is None else "reserved"
    canvas = Canvas(f"Peak {kind} memory with one saving each, predicted")
    axes = canvas.axes
    _bar(axes, 0, plan.current.peak_bytes or 0, longest, REST_COLOUR, _text_of(plan, plan.current))
    place = 1
    for group in SavingGroup:
        rows = [row for row in shown if row.group == group]
        if rows:
            axes.text(
                0,
                place,
                group.value,
                va="center",
                fontsize=SMALL_LETTERS,
                color=TEXT_COLOUR,
                weight="bold",
            )
            place += 1
        for row in rows:
            _bar(axes, place, row.peak_bytes or 0, longest, GOOD_COLOUR, _text_of(plan, row))
            place += 1
    axes.set_xlim(0, longest)
    axes.invert_yaxis()
    axes.set_axis_off()
    return canvas.pixels()


def _bar(axes: Any, place: int, size: int, longest: int, colour: str, text: str) -> None:
    axes.barh(place, size, color=colour, alpha=0.55, height=0.86)
    axes.text(
        longest * 0.01, place, text, va="center", fontsize=SMALL_LETTERS, color=TEXT_COLOUR
    ).set_in_layout(False)


def _text_of(plan: Plan, row: PlanRow) -> str:
    """The peak, the saving, what it costs, and the batch size that fits."""
    name = "as it is" if row is plan.current else shortened(plan.name_of(row), _NUM_LETTERS)
    text = f"{brief_bytes(row.peak_bytes or 0)}  {name}"
    if row.extra_compute_pct and abs(row.extra_compute_pct) >= 1:
        text += f", {row.extra_compute_pct:+.0f} % compute"
    if row.largest_batch_size is not None:
        text += f", batch ≤ {row.largest_batch_size:,}"
    return text
