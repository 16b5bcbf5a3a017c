"""The pictures of `model_chart.py`: accuracy over memory per image, and the largest batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

MiB = 2**20
#: One for each family, in the order of the data.
COLOURS = (
    *("#4e79a7", "#a0cbe8", "#f28e2b", "#8c564b", "#e15759", "#59a14f", "#8cd17d"),
    *("#b6992d", "#499894", "#b07aa1", "#d37295", "#1b6ca8", "#d4a017"),
)
SHOWN_PRECISION = "bf16-mixed"
OTHER_PRECISION = "32-true"
TITLE_SIZE, LABEL_SIZE = 15, 8.5
_Box = tuple[float, float, float, float]


def draw(models: list[dict[str, Any]], folder: Path) -> None:
    """Draw both pictures.

    Args:
        models: The points, as in models.json.
        folder: Where they go, as `models.png` and `models-largest-batch.png`.
    """
    families = dict(zip(dict.fromkeys(model["family"] for model in models), COLOURS, strict=False))
    _chart(models, families, folder / "models.png")
    _batches(models, families, folder / "models-largest-batch.png")


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors="#444444", labelsize=9)
    axes.set_axisbelow(True)
    return figure, axes


def _plain_log(axis: Any, ticks: Sequence[float]) -> None:
    axis.set_ticks(ticks)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _area(model: dict[str, Any]) -> float:
    """Of the bubble, in square points."""
    return 4.2 * float(model["num_parameters"]) / 1e6


def _chart(models: list[dict[str, Any]], families: dict[str, str], to: Path) -> None:
    figure, axes = _figure(12, 8.4)
    xs = [model["trainings"][SHOWN_PRECISION]["memory_per_image_bytes"] / MiB for model in models]
    ys = [model["accuracy_pct"] for model in models]
    axes.set_xscale("log")
    for family, colour in families.items():
        of_family = [number for number, model in enumerate(models) if model["family"] == family]
        places = [[values[number] for number in of_family] for values in (xs, ys)]
        areas = [_area(models[number]) for number in of_family]
        axes.scatter(*places, s=areas, color=colour, alpha=0.45, edgecolors=colour, linewidths=0.8)
        axes.scatter(*places, s=5, color="#222222", zorder=3)
        axes.scatter([], [], s=60, color=colour, alpha=0.7, label=family)
    axes.set_xlim(min(xs) / 1.25, max(xs) * 1.35)
    axes.set_ylim(min(ys) - 2.5, max(ys) + 2.5)
    _plain_log(axes.xaxis, [2, 3, 4, 6, 10, 20, 30, 50, 100, 200, 300, 500])
    axes.set_xlim(min(xs) / 1.25, max(xs) * 1.35)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_xlabel(
        f"training memory per image, MiB (predicted, {SHOWN_PRECISION}, SGD with momentum)",
        fontsize=11,
    )
    axes.set_ylabel("top-1 accuracy on ImageNet-1K, %", fontsize=11)
    axes.set_title(
        "What an image costs to train on", fontsize=TITLE_SIZE, loc="left", fontweight="bold"
    )
    legend = axes.legend(
        loc="lower right",
        fontsize=8.5,
        frameon=True,
        framealpha=0.9,
        edgecolor="#dddddd",
        ncols=2,
        title="area: parameters",
    )
    for millions in (5, 50, 150):
        axes.scatter(
            [],
            [],
            s=_area({"num_parameters": millions * 1e6}),
            color="#bbbbbb",
            label=f"{millions} M",
        )
    handles, labels = axes.get_legend_handles_labels()
    legend.remove()
    axes.legend(
        handles,
        labels,
        loc="lower right",
        fontsize=8.5,
        framealpha=0.95,
        edgecolor="#dddddd",
        ncols=2,
        title="bubble area: parameters",
        labelspacing=1.15,
        borderpad=0.9,
        handletextpad=0.9,
    )
    figure.draw_without_rendering()
    _label(figure, axes, models, list(zip(xs, ys, strict=True)))
    figure.savefig(to)


def _label(
    figure: Figure, axes: Any, models: list[dict[str, Any]], places: list[tuple[float, float]]
) -> None:
    """Put a name beside each point, where it covers the least.

    Places are tried in rings around the point, crowded points first.
    """
    points = [tuple(axes.transData.transform(place)) for place in places]
    scale = figure.dpi / 72
    sizes = []
    for model in models:
        text = axes.text(*places[0], model["name"], fontsize=LABEL_SIZE)
        box = text.get_window_extent()
        sizes.append((box.width, box.height))
        text.remove()
    window = axes.get_window_extent()
    legend = axes.get_legend().get_window_extent()
    dots: list[_Box] = [
        (x - 3 * scale, y - 3 * scale, x + 3 * scale, y + 3 * scale) for x, y in points
    ]
    taken: list[_Box] = [(legend.x0, legend.y0, legend.x1, legend.y1)]
    crowded = sorted(
        range(len(models)),
        key=lambda n: sum(math.dist(points[n], point) for point in _nearest(points, n)),
    )
    for number in crowded:
        (x, y), (width, height) = points[number], sizes[number]
        best: tuple[float, float, float, _Box] | None = None
        for ring, distance in enumerate((5, 11, 18, 27, 38, 52)):
            for turn in range(16):
                angle = 2 * math.pi * turn / 16
                centre_x = x + math.cos(angle) * (distance * scale + width / 2)
                centre_y = y + math.sin(angle) * (distance * scale + height / 2)
                box = (
                    centre_x - width / 2 - 2,
                    centre_y - height / 2 - 1,
                    centre_x + width / 2 + 2,
                    centre_y + height / 2 + 1,
                )
                cost = sum(
                    _overlap(box, other)
                    for other in [*taken, *(dot for n, dot in enumerate(dots) if n != number)]
                )
                is_outside = (
                    box[0] < window.x0
                    or box[2] > window.x1
                    or box[1] < window.y0
                    or box[3] > window.y1
                )
                cost = (
                    100 * cost + (1e9 if is_outside else 0) + 30 * ring + 3 * abs(math.sin(angle))
                )
                if best is None or cost < best[0]:
                    best = (cost, centre_x, centre_y, box)
        assert best is not None
        _, centre_x, centre_y, box = best
        taken.append(box)
        at = axes.transData.inverted().transform((centre_x, centre_y))
        is_far = (
            math.dist((min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])), (x, y))
            > 9 * scale
        )
        line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            models[number]["name"],
            places[number],
            xytext=at,
            ha="center",
            va="center",
            fontsize=LABEL_SIZE,
            color="#222222",
            arrowprops=line if is_far else None,
        )


def _nearest(points: list[tuple[float, ...]], number: int) -> list[tuple[float, ...]]:
    return sorted(points, key=lambda point: math.dist(point, points[number]))[1:4]


def _overlap(first: _Box, second: _Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return width * height if width > 0 and height > 0 else 0.0


def _batches(models: list[dict[str, Any]], families: dict[str, str], to: Path) -> None:
    ordered = sorted(
        models, key=lambda model: model["trainings"][SHOWN_PRECISION]["suggested_batch_size"]
    )
    figure, axes = _figure(10, 1.6 + 0.235 * len(models))
    axes.set_xscale("log")
    for row, model in enumerate(ordered):
        low, high = (
            max(1, model["trainings"][precision]["suggested_batch_size"])
            for precision in (OTHER_PRECISION, SHOWN_PRECISION)
        )
        colour = families[model["family"]]
        axes.plot(
            [low, high],
            [row, row],
            color=colour,
            linewidth=2.2,
            alpha=0.5,
            solid_capstyle="round",
            zorder=2,
        )
        axes.scatter(
            [low], [row], s=34, facecolors="white", edgecolors=colour, linewidths=1.6, zorder=3
        )
        axes.scatter([high], [row], s=34, color=colour, zorder=3)
        axes.annotate(
            str(low),
            (low, row),
            xytext=(-7, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=7.5,
            color="#666666",
        )
        axes.annotate(
            str(high),
            (high, row),
            xytext=(7, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=7.5,
        )
    names = [
        f"{model['name']}  {model['image_size']}" if model["image_size"] != 224 else model["name"]
        for model in ordered
    ]
    axes.set_yticks(range(len(ordered)), names, fontsize=8.5)
    axes.set_ylim(-0.8, len(ordered) - 0.2)
    _plain_log(axes.xaxis, [2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000])
    sizes = [
        model["trainings"][precision]["suggested_batch_size"]
        for model in models
        for precision in (OTHER_PRECISION, SHOWN_PRECISION)
    ]
    axes.set_xlim(max(1, min(sizes)) / 1.7, max(sizes) * 1.6)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.7)
    axes.scatter(
        [],
        [],
        s=34,
        facecolors="white",
        edgecolors="#555555",
        linewidths=1.6,
        label=OTHER_PRECISION,
    )
    axes.scatter([], [], s=34, color="#555555", label=SHOWN_PRECISION)
    axes.legend(loc="lower right", fontsize=9, framealpha=0.95, edgecolor="#dddddd")
    axes.set_xlabel(
        "images (predicted; without a retry of the allocator, 5 % of the card kept free)",
        fontsize=10,
    )
    axes.set_title(
        "The largest batch on a card of 24 GiB\n",
        fontsize=TITLE_SIZE,
        loc="left",
        fontweight="bold",
    )
    axes.text(
        0,
        1.005,
        "SGD with momentum; images of 224 x 224 unless the name says otherwise",
        transform=axes.transAxes,
        fontsize=9,
        color="#555555",
        va="bottom",
    )
    figure.savefig(to)
