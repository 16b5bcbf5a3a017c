"""batch_size_curve(): the peak over the batch size, on linear axes, up to a little too much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcallback.batch_size.advice import BatchSizeAdvice
from memcallback.core.units import brief_bytes
from memcallback.report.plots.canvas import (
    BAD_COLOUR,
    FAINT_COLOUR,
    GOOD_COLOUR,
    LETTERS,
    NOW_COLOUR,
    SMALL_LETTERS,
    Canvas,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: How far the curve goes beyond the suggestion.
_BEYOND = 1.3


def batch_size_curve(advice: BatchSizeAdvice) -> npt.NDArray[np.uint8]:
    """The expected peak, the device's capacity, the present and the suggested batch size."""
    canvas = Canvas(f"Peak {advice.counts} memory over the batch size")
    axes = canvas.axes
    end = _BEYOND * max(2, advice.batch_size, advice.current_batch_size)
    curve = [(size, peak) for size, peak in advice.curve if size <= end]
    unit = canvas.set_heights(max(peak for _, peak in curve), advice.capacity_bytes, above=1.25)
    # Sizes double from point to point, so the last one can lie far before the end.
    points = [(size, peak / unit) for size, peak in curve]
    axes.plot(*zip(*points, strict=True), color=NOW_COLOUR, linewidth=2, label="expected peak")
    budget = max(0, advice.budget_bytes)
    if budget / unit <= axes.get_ylim()[1]:
        label = f"limit with headroom {brief_bytes(budget)}"
        axes.axhline(budget / unit, color=BAD_COLOUR, linestyle=":", label=label)
    peaks = dict(advice.curve)
    for name, size, colour in (
        ("now", advice.current_batch_size, NOW_COLOUR),
        ("suggested", advice.batch_size, GOOD_COLOUR),
    ):
        if size in peaks:
            axes.plot([size], [peaks[size] / unit], "o", markersize=9, color=colour)
            # Below the line; near the axis that is further to the right.
            is_left = size < end / 2
            is_low = peaks[size] / unit < 0.1 * axes.get_ylim()[1]
            axes.annotate(
                f"{name} {size:,}: {brief_bytes(peaks[size])}",
                (size if is_left else end, peaks[size] / unit),
                ((60, 2) if is_low else (10, -18) if is_left else (0, -66)),
                textcoords="offset points",
                ha="left" if is_left else "right",
                fontsize=LETTERS,
                color=colour,
            )
    axes.set_xlim(0, end)
    axes.set_xlabel("samples per batch", fontsize=LETTERS, color=FAINT_COLOUR)
    axes.xaxis.set_major_locator(_few_round_ticks())
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    axes.tick_params(labelsize=SMALL_LETTERS)
    canvas.show_legend("upper left")
    return canvas.pixels()


def _few_round_ticks() -> object:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5, integer=True)
