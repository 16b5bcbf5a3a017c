"""Plots: a step by category, the batch-size curve, savings, modules.

Drawn without pyplot, so that a program's own figures and its choice of backend stay as they are.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memcallback.batch_size.advice import BatchSizeAdvice
from memcallback.core.module_table import ModuleMemory, ModuleTable
from memcallback.core.step_memory import MemoryStats, StepMemory
from memcallback.core.types import PERSISTENT_CATEGORIES, Category, Phase
from memcallback.core.units import GiB, KiB, MiB, format_bytes
from memcallback.prediction.prediction import StepPrediction
from memcallback.prediction.textbook.law import TextbookPrediction
from memcallback.savings.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_COLOURS = {
    Category.PARAMETER: "#4e79a7",
    Category.BUFFER: "#a0cbe8",
    Category.GRADIENT: "#f28e2b",
    Category.OPTIMIZER_STATE: "#59a14f",
    Category.INPUT: "#b07aa1",
}
_REST_COLOUR = "#d4d4d4"
_PREDICTED_COLOUR = "#c62828"
_HELPS_COLOUR = "#59a14f"
#: Savings in the picture.
_NUM_BARS = 24
#: Colours of the most frequent module classes, in this order; others are grey.
_CLASS_COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#76b7b2",
    "#edc948",
    "#b07aa1",
    "#9c755f",
    "#ff9da7",
    "#a0cbe8",
)
#: Levels of modules in the picture, and the share of its width from which a module is labelled.
_NUM_LEVELS = 7
_SHARE_WITH_NAME = 0.035


def step_by_category(
    measured: StepMemory, prediction: StepPrediction | None
) -> npt.NDArray[np.uint8]:
    """Memory at each boundary of a measured step by category, with measured and predicted peaks."""
    moments = [
        (name, stats)
        for name, stats in _boundaries(measured)
        if stats.by_category and stats.allocated_bytes is not None
    ]
    if not moments:
        raise ValueError(
            "The step has no sizes by category. "
            "Take a sampled step of a recorder that knows its model."
        )
    unit, unit_name = _unit(
        max(
            measured.peak_allocated_bytes or 0,
            *(stats.allocated_bytes or 0 for _, stats in moments),
        )
    )
    figure, axes = _canvas()
    positions = range(len(moments))
    bottoms = [0.0] * len(moments)
    stacks = [
        (c.label, _COLOURS[c], [(s.by_category or {}).get(c, 0) for _, s in moments])
        for c in PERSISTENT_CATEGORIES
    ]
    stacks.append(
        ("activations and other", _REST_COLOUR, [stats.rest_bytes or 0 for _, stats in moments])
    )
    for label, colour, sizes in stacks:
        heights = [size / unit for size in sizes]
        axes.bar(positions, heights, bottom=bottoms, label=label, color=colour, width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    _draw_peaks(axes, measured, prediction, [name for name, _ in moments], unit)
    axes.set_xticks(list(positions), [name for name, _ in moments])
    axes.set_ylabel(f"allocated ({unit_name})")
    axes.set_title(
        f"One training step by category, batch size {measured.batch_size or 'unknown'}, "
        f"{measured.device_name}, measured"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _pixels(figure)


def _boundaries(step: StepMemory) -> list[tuple[str, MemoryStats]]:
    moments = []
    for phase in Phase:
        if window := step.phases.get(phase):
            moments += [
                (f"{window.label}\nstart", window.start),
                (f"{window.label}\nend", window.end),
            ]
    return moments


def _draw_peaks(
    axes: Any, measured: StepMemory, prediction: StepPrediction | None, names: list[str], unit: int
) -> None:
    predicted = prediction.phases if prediction else {}
    for number, (phase, window) in enumerate(measured.phases.items()):
        if f"{window.label}\nstart" not in names:
            continue
        left = names.index(f"{window.label}\nstart")
        right = left + 1
        label = "measured peak of the phase" if number == 0 else None
        if window.peak_allocated_bytes is not None:
            axes.plot(
                [left - 0.35, right + 0.35],
                [window.peak_allocated_bytes / unit] * 2,
                color="black",
                linewidth=2,
                label=label,
            )
        ours = predicted.get(phase)
        if ours and ours.peak_allocated_bytes is not None:
            high = ours.peak_allocated_bytes / unit
            if ours.low_bytes is not None:
                band = "predicted band" if number == 0 else None
                edges = ours.low_bytes / unit, high
                axes.fill_between(
                    [left - 0.35, right + 0.35],
                    *edges,
                    color=_PREDICTED_COLOUR,
                    alpha=0.15,
                    label=band,
                )
            axes.plot(
                [left - 0.35, right + 0.35],
                [high] * 2,
                "--",
                color=_PREDICTED_COLOUR,
                label="predicted peak" if number == 0 else None,
            )


def batch_size_curve(
    advice: BatchSizeAdvice, prediction: StepPrediction | None
) -> npt.NDArray[np.uint8]:
    """The peak over the batch size, with the device's capacity and the suggestion."""
    largest = max(2, 2 * max(advice.batch_size, advice.current_batch_size))
    unit, unit_name = _unit(advice.capacity_bytes)
    figure, axes = _canvas()
    sizes, peaks = zip(*advice.curve, strict=True)
    expected = [peak / unit for peak in peaks]
    if isinstance(prediction, TextbookPrediction):
        predicted_sizes = sorted({max(1, round(largest ** (i / 60))) for i in range(61)})
        axes.plot(
            predicted_sizes,
            [prediction.at(size).peak_allocated_bytes / unit for size in predicted_sizes],
            "--",
            color=_PREDICTED_COLOUR,
            label=f"predicted peak ({prediction.source})",
        )
    elif prediction is not None and not advice.is_measured:
        axes.plot(
            sizes,
            expected,
            "--",
            color=_PREDICTED_COLOUR,
            label=f"predicted {advice.counts} peak ({prediction.source})",
        )
    if advice.is_measured:
        axes.plot(sizes, expected, color="black", label="peak expected from the measured step")
    axes.axhline(advice.capacity_bytes / unit, color="#555555", label="capacity")
    axes.axhline(
        max(0, advice.budget_bytes) / unit,
        color="#555555",
        linestyle=":",
        label="capacity less headroom and others' use",
    )
    if (limit := advice.limit_without_retry) and limit <= largest:
        axes.axvline(limit, color="#555555", linestyle="-.", label=f"limit without a retry {limit}")
    if advice.batch_size:
        axes.axvline(
            advice.batch_size, color="#59a14f", label=f"suggested batch size {advice.batch_size}"
        )
    axes.axvline(
        advice.current_batch_size,
        color="#4e79a7",
        linestyle="--",
        label=f"current batch size {advice.current_batch_size}",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch size")
    axes.set_ylabel(f"peak ({unit_name})")
    axes.set_title("Peak memory over the batch size")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _pixels(figure)


def what_if_bars(plan: Plan) -> npt.NDArray[np.uint8]:
    """The peak with each saving beside the present one, and the largest batch size that fits."""
    rows = [row for row in plan.rows if row.peak_bytes is not None][:_NUM_BARS]
    present_bytes = plan.current.peak_bytes
    if not rows or present_bytes is None:
        raise ValueError("The plan has no saving that was predicted.")
    unit, unit_name = _unit(max(present_bytes, *(row.peak_bytes or 0 for row in rows)))
    figure, axes = _canvas()
    figure.set_size_inches(11, 1.4 + 0.3 * len(rows))
    for position, row in enumerate(rows):
        colour = _HELPS_COLOUR if plan.helps(row) else _REST_COLOUR
        axes.barh(position, (row.peak_bytes or 0) / unit, color=colour, height=0.7)
        fits = "" if row.largest_batch_size is None else f"  fits up to {row.largest_batch_size:,}"
        extra = (
            f", {row.extra_compute_pct:+.0f} % compute"
            if row.extra_compute_pct and abs(row.extra_compute_pct) >= 1
            else ""
        )
        axes.text(
            (row.peak_bytes or 0) / unit,
            position,
            f"{fits}{extra}",
            va="center",
            fontsize=9,
            bbox={"color": "white", "pad": 0},
        )
    axes.axvline(
        present_bytes / unit,
        color="black",
        linestyle="--",
        label=f"as it is, batch size {plan.current.batch_size}",
    )
    axes.set_yticks(
        range(len(rows)), [textwrap.fill(plan.name_of(row), 56) for row in rows], fontsize=8
    )
    axes.invert_yaxis()
    axes.margins(x=0.5, y=0.01)
    axes.set_xlim(left=0)
    kind = "allocated" if plan.current.peak_reserved_bytes is None else "reserved"
    axes.set_xlabel(f"{kind} peak ({unit_name}), predicted")
    axes.set_title(f"What savings would buy on {plan.device_name}")
    axes.legend(loc="upper right")
    return _pixels(figure)


def module_icicle(table: ModuleTable, other: ModuleTable | None = None) -> npt.NDArray[np.uint8]:
    """What each module's forward pass left allocated as a width, inner modules below outer ones.

    Inner modules share the width of their outer module if they leave more than it does, because it
    frees their outputs.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tables = [table, other] if other else [table]
    counts = Counter(module.kind for shown in tables for module in shown.ran if module.kept_bytes)
    colours = dict(zip((kind for kind, _ in counts.most_common()), _CLASS_COLOURS, strict=False))
    unit, unit_name = _unit(max((shown[""].kept_bytes or 0 for shown in tables), default=0))
    figure = Figure(figsize=(13, 3.8 * len(tables)), dpi=100, layout="constrained")
    for axes, shown in zip(
        figure.subplots(len(tables), squeeze=False, sharex=True)[:, 0], tables, strict=True
    ):
        total_bytes = max(shown[""].kept_bytes or 0, 1)
        num_levels = 0
        for module, level, left, width in _boxes(shown):
            num_levels = max(num_levels, level + 1)
            colour = colours.get(module.kind, _REST_COLOUR)
            axes.barh(
                level,
                width / unit,
                left=left / unit,
                height=1,
                color=colour,
                edgecolor="white",
                linewidth=0.6,
            )
            if width >= _SHARE_WITH_NAME * total_bytes:
                name = module.name.rpartition(".")[2] or "model"
                text = (
                    f"{name}\n{format_bytes(module.kept_bytes or 0)}"
                    if width >= 2.5 * _SHARE_WITH_NAME * total_bytes
                    else name
                )
                axes.text(
                    (left + width / 2) / unit,
                    level,
                    text,
                    ha="center",
                    va="center",
                    fontsize=7,
                    clip_on=True,
                )
        axes.set_ylim(num_levels - 0.5, -0.5)
        axes.set_yticks([])
        axes.set_xlim(0, max(box[3] for each in tables for box in _boxes(each)) / unit or 1)
        axes.set_title(
            f"Kept after the forward pass by module, batch size {shown.batch_size or 'unknown'}, "
            f"{shown.device_name}, {shown.step_kind.value}"
        )
    axes.set_xlabel(f"allocated ({unit_name})")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()],
        loc="outside right upper",
        frameon=False,
        fontsize=8,
    )
    return _pixels(figure)


def _boxes(table: ModuleTable) -> Iterator[tuple[ModuleMemory, int, float, float]]:
    """Each module that keeps memory, with its level, its left edge and its width, in bytes."""
    pending: list[tuple[ModuleMemory, int, float, float]] = [
        (table[""], 0, 0.0, float(max(table[""].kept_bytes or 0, 0)))
    ]
    while pending:
        box = pending.pop()
        module, level, left, width = box
        yield box
        inside = [(child, max(child.kept_bytes or 0, 0)) for child in table.children(module.name)]
        needed = sum(kept for _, kept in inside)
        scale = min(1.0, width / needed) if needed else 0.0
        for child, kept in inside if level + 1 < _NUM_LEVELS else ():
            if kept:
                pending.append((child, level + 1, left, kept * scale))
                left += kept * scale


def _unit(largest_bytes: int) -> tuple[int, str]:
    return (
        (GiB, "GiB")
        if largest_bytes > GiB
        else (MiB, "MiB")
        if largest_bytes > MiB
        else (KiB, "KiB")
    )


def _canvas() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=100, layout="constrained")
    return figure, figure.add_subplot()


def _pixels(figure: Any) -> npt.NDArray[np.uint8]:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
