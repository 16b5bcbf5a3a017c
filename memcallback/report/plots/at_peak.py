"""at_peak(): what is in memory at the predicted peak, by category and by who holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcallback.core.units import brief_bytes
from memcallback.prediction.prediction import Prediction
from memcallback.report.plots.canvas import (
    COLOURS,
    REST_COLOUR,
    SMALL_LETTERS,
    TEXT_COLOUR,
    Canvas,
    shortened,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NUM_BARS = 10
#: A bar's least share of the peak.
_LEAST_SHARE = 0.005
#: Letters that fit beside the bars.
_NUM_LETTERS = 42


def at_peak(prediction: Prediction) -> npt.NDArray[np.uint8]:
    """A bar for each category, then for those who hold most."""
    total = max(1, prediction.peak_allocated_bytes)
    categories = [
        (category.label, num_bytes, COLOURS[category])
        for category, num_bytes in sorted(prediction.by_category.items(), key=lambda one: -one[1])
        if num_bytes >= _LEAST_SHARE * total
    ]
    parts = prediction.consumers[: max(3, _NUM_BARS - len(categories))]
    modules = [
        (part.name, part.num_bytes, REST_COLOUR)
        for part in parts
        if part.num_bytes >= _LEAST_SHARE * total
    ]
    canvas = Canvas(f"In memory at the predicted peak: {brief_bytes(total)}")
    axes = canvas.axes
    # A gap between the two kinds of bars.
    places = [*range(len(categories)), *(len(categories) + 0.6 + n for n in range(len(modules)))]
    for place, (name, num_bytes, colour) in zip(places, [*categories, *modules], strict=True):
        axes.barh(place, num_bytes, color=colour, height=0.86)
        text = f"{shortened(name, _NUM_LETTERS)}  {brief_bytes(num_bytes)}"
        is_inside = num_bytes > 0.6 * total
        axes.text(
            total * 0.01 if is_inside else num_bytes + total * 0.01,
            place,
            f"{text}  {100 * num_bytes / total:.0f} %",
            va="center",
            fontsize=SMALL_LETTERS,
            color=TEXT_COLOUR,
        ).set_in_layout(False)
    axes.set_xlim(0, total)
    axes.invert_yaxis()
    axes.set_axis_off()
    return canvas.pixels()
