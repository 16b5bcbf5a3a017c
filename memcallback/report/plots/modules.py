"""module_icicle(): what each module's forward pass left allocated, inner modules inside outer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcallback.core.module_table import ModuleMemory, ModuleTable
from memcallback.core.units import brief_bytes
from memcallback.report.plots.canvas import REST_COLOUR, SMALL_LETTERS, TEXT_COLOUR, Canvas

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
#: Levels of modules in the picture, and the share of its width that a letter of a label takes.
_NUM_LEVELS = 6
_SHARE_OF_LETTER = 0.016
#: The share of what a module keeps from which the only one inside stands for it.
_ALL_BUT_ALL = 0.98
#: Classes in the legend.
_NUM_NAMED = 6


def module_icicle(table: ModuleTable) -> npt.NDArray[np.uint8]:
    """A box for each module that keeps memory, as wide as it keeps; modules of one class alike.

    Inner modules share the width of their outer module if they leave more than it does, because it
    frees their outputs. A module that only holds another is left out.
    """
    from matplotlib.patches import Patch

    total = max(table[""].kept_bytes or 0, 1)
    canvas = Canvas(f"Kept after the forward pass, by module: {brief_bytes(total)}")
    axes = canvas.axes
    boxes = list(_boxes(table))
    counts = Counter(module.kind for module, *_ in boxes)
    colours = dict(zip((kind for kind, _ in counts.most_common()), _CLASS_COLOURS, strict=False))
    for module, level, left, width in boxes:
        colour = colours.get(module.kind, REST_COLOUR)
        axes.barh(level, width, left=left, height=1, color=colour, alpha=0.75, edgecolor="white")
        name = module.name.rpartition(".")[2] or "model"
        lines = [name, brief_bytes(module.kept_bytes or 0)]
        fitting = [line for line in lines if len(line) * _SHARE_OF_LETTER * total <= width]
        axes.text(
            left + width / 2,
            level,
            "\n".join(fitting),
            ha="center",
            va="center",
            fontsize=SMALL_LETTERS,
            color=TEXT_COLOUR,
            clip_on=True,
        )
    axes.set_xlim(0, total)
    axes.set_ylim(max(level for _, level, *_ in boxes) + 1.5, -0.5)
    axes.set_axis_off()
    patches = [
        Patch(color=colour, alpha=0.75, label=kind)
        for kind, colour in list(colours.items())[:_NUM_NAMED]
    ]
    canvas.show_legend("lower left", 2, handles=patches)
    return canvas.pixels()


def _boxes(table: ModuleTable) -> Iterator[tuple[ModuleMemory, int, float, float]]:
    """Each module that keeps memory, with its level, its left edge and its width, in bytes."""
    root = table[""]
    pending: list[tuple[ModuleMemory, int, float, float]] = [
        (root, 0, 0.0, float(max(root.kept_bytes or 0, 0)))
    ]
    while pending:
        module, level, left, width = pending.pop()
        inside = _keeping(table, module)
        while len(inside) == 1 and inside[0][1] >= _ALL_BUT_ALL * (module.kept_bytes or 0):
            module = inside[0][0]
            inside = _keeping(table, module)
        yield module, level, left, width
        needed = sum(kept for _, kept in inside)
        scale = min(1.0, width / needed) if needed else 0.0
        for child, kept in inside if level + 1 < _NUM_LEVELS else ():
            pending.append((child, level + 1, left, kept * scale))
            left += kept * scale


def _keeping(table: ModuleTable, module: ModuleMemory) -> list[tuple[ModuleMemory, int]]:
    """The modules inside another that keep memory, with what they keep."""
    return [(child, child.kept_bytes) for child in table.children(module.name) if child.kept_bytes]
