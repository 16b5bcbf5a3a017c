"""timeline() and boundaries(): the memory of one step over its course, stacked by category."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcallback.core.step_memory import MemoryStats, StepMemory
from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Phase
from memcallback.core.units import brief_bytes
from memcallback.page.timeline import Timeline
from memcallback.prediction.prediction import Prediction
from memcallback.report.plots.canvas import (
    COLOURS,
    FAINT_COLOUR,
    LETTERS,
    REST_COLOUR,
    SMALL_LETTERS,
    TEXT_COLOUR,
    Canvas,
    shortened,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PHASE_COLOURS = {
    Phase.FORWARD: "#f2f5fa",
    Phase.BACKWARD: "#fbf6ee",
    Phase.OPTIMIZER_STEP: "#eff7f0",
}
#: A phase whose share of the width is smaller has no room for its name.
_LEAST_SHARE = 0.12
#: The share of the peak from which a category is in the legend.
_NAMED_SHARE = 0.01


def timeline(prediction: Prediction, measured: StepMemory | None = None) -> npt.NDArray[np.uint8]:
    """The predicted step from allocation to allocation, with the measured peaks as circles."""
    shown = prediction.timeline(measured)
    peak_bytes = _peak_bytes(shown)
    of = "" if shown.capacity_bytes is None else f" of {brief_bytes(shown.capacity_bytes)}"
    canvas = Canvas(f"One step, predicted: peak {brief_bytes(peak_bytes)}{of}")
    axes = canvas.axes
    highest = max(
        max(moment.allocated_bytes, moment.reserved_bytes or 0) for moment in shown.moments
    )
    unit = canvas.set_heights(highest, shown.capacity_bytes, above=1.45)
    edges = range(len(shown.moments) + 1)
    bottoms = [0.0] * len(shown.moments)
    for position, category in enumerate(Category):
        sizes = [moment.by_category[position] / unit for moment in shown.moments]
        if any(sizes):
            tops = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
            axes.stairs(
                tops,
                edges,
                baseline=bottoms,
                fill=True,
                color=COLOURS[category],
                label=category.label if max(sizes) * unit >= _NAMED_SHARE * peak_bytes else None,
            )
            bottoms = tops
    reserved = [moment.reserved_bytes for moment in shown.moments]
    known = [size / unit for size in reserved if size is not None]
    if known and len(known) == len(reserved):
        axes.stairs(
            known, edges, baseline=None, color=TEXT_COLOUR, linestyle="--", label="reserved"
        )
    _draw_phases(canvas, shown, unit)
    axes.set_xlim(0, len(shown.moments))
    axes.set_xticks([])
    canvas.show_legend("upper left", 3)
    return canvas.pixels()


def _peak_bytes(shown: Timeline) -> int:
    return shown.moments[shown.peak].allocated_bytes


def _draw_phases(canvas: Canvas, shown: Timeline, unit: int) -> None:
    """A background for each phase, its name below, its measured peak; then what makes the peak."""
    axes = canvas.axes
    for phase, start, stop in shown.phases:
        axes.axvspan(start, stop, color=_PHASE_COLOURS[phase], zorder=0)
        if stop - start >= _LEAST_SHARE * len(shown.moments):
            axes.text(
                (start + stop) / 2,
                -0.02,
                phase.label,
                fontsize=LETTERS,
                color=FAINT_COLOUR,
                ha="center",
                va="top",
                transform=axes.get_xaxis_transform(),
            )
    circles = {
        max(range(start, stop), key=lambda one: shown.moments[one].allocated_bytes)
        + 0.5: shown.measured[phase] / unit
        for phase, start, stop in shown.phases
        if phase in shown.measured
    }
    if circles:
        axes.plot(
            list(circles),
            list(circles.values()),
            "o",
            markersize=9,
            color="white",
            markeredgecolor=TEXT_COLOUR,
            markeredgewidth=2,
            label="measured",
            zorder=5,
        )
    x = shown.peak + 0.5
    axes.annotate(
        shortened(shown.moments[shown.peak].what, 24),
        (x, _peak_bytes(shown) / unit),
        (0, 10),
        textcoords="offset points",
        fontsize=SMALL_LETTERS,
        color=TEXT_COLOUR,
        ha="right" if x > len(shown.moments) / 2 else "left",
    )


def boundaries(measured: StepMemory) -> npt.NDArray[np.uint8]:
    """A measured step at the boundaries of its phases by category, and the peaks between them.

    For a step that cannot be traced.
    """
    canvas = Canvas(f"One step, measured: peak {brief_bytes(measured.peak_allocated_bytes or 0)}")
    bars = [bar for phase in Phase for bar in _bars_of(measured, phase)]
    unit = canvas.set_heights(measured.peak_allocated_bytes or 1, None, above=1.45)
    places = range(len(bars))
    bottoms = [0.0] * len(bars)
    for category in PERSISTENT_CATEGORIES:
        sizes = [(stats.by_category or {}).get(category, 0) / unit for _, stats, _ in bars]
        if any(sizes):
            canvas.axes.bar(
                places, sizes, bottom=bottoms, color=COLOURS[category], label=category.label
            )
            bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    rests = [(stats.rest_bytes or 0) / unit for _, stats, _ in bars]
    canvas.axes.bar(
        places,
        rests,
        bottom=bottoms,
        color=COLOURS[Category.ACTIVATION],
        label="activations, temporary",
    )
    peaks = [(place, peak / unit) for place, (_, _, peak) in enumerate(bars) if peak is not None]
    if peaks:
        canvas.axes.bar(
            [place for place, _ in peaks],
            [peak for _, peak in peaks],
            color=REST_COLOUR,
            label="peak of the phase",
            zorder=0,
        )
    canvas.axes.set_xticks(list(places), [name for name, _, _ in bars])
    canvas.show_legend("upper left", 2)
    return canvas.pixels()


def _bars_of(measured: StepMemory, phase: Phase) -> list[tuple[str, MemoryStats, int | None]]:
    """The bars of a phase: where it starts, its peak, of which the split is unknown, its end."""
    window = measured.phases.get(phase)
    if window is None:
        return []
    name = phase.label.replace(" step", "")
    return [
        (f"{name}\nstart", window.start, None),
        ("peak", MemoryStats(), window.peak_allocated_bytes),
        ("end", window.end, None),
    ]
