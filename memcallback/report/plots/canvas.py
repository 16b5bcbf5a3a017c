"""Canvas: the size, letters and colours that all pictures share.

Drawn without pyplot, so that a program's own figures and backend stay as they are. Colours and
letters are set here, so that the program's rcParams, which stay as they are, change none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcallback.core.types import Category
from memcallback.core.units import GiB, KiB, MiB, brief_bytes
from memcallback.page.scale import Scale

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Inches at 100 dots each.
_SIZE, _DPI = (6.4, 4.0), 100
#: It comes with matplotlib.
_FONT = "DejaVu Sans"
#: Points.
LETTERS, SMALL_LETTERS = 14, 12
#: As on the page.
COLOURS = {
    Category.PARAMETER: "#4e79a7",
    Category.BUFFER: "#86b4d6",
    Category.GRADIENT: "#f28e2b",
    Category.OPTIMIZER_STATE: "#59a14f",
    Category.INPUT: "#b07aa1",
    Category.ACTIVATION: "#9a9cd8",
    Category.TEMPORARY: "#e15759",
    Category.WORKSPACE: "#a9a29b",
}
TEXT_COLOUR, FAINT_COLOUR = "#1d2327", "#5d666d"
GOOD_COLOUR, BAD_COLOUR, NOW_COLOUR, PREDICTED_COLOUR = "#2e7d32", "#c62828", "#35608c", "#f28e2b"
REST_COLOUR = "#d4d4d4"


class Canvas:
    """One pair of axes with a title; sizes go up from 0 in the unit of the largest."""

    def __init__(self, title: str) -> None:
        from matplotlib.figure import Figure

        self.figure: Any = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained", facecolor="white")
        self.axes: Any = self.figure.add_subplot(facecolor="white")
        self.axes.grid(visible=False)
        self.axes.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
        self.axes.set_title(title, fontsize=LETTERS, color=TEXT_COLOUR, loc="left")
        self.axes.tick_params(labelsize=SMALL_LETTERS, colors=FAINT_COLOUR)
        for side, spine in self.axes.spines.items():
            spine.set(visible=side in ("left", "bottom"), color="black")

    def set_heights(self, highest: int, capacity_bytes: int | None, *, above: float = 1.0) -> int:
        """The vertical axis for sizes up to one, so many times as high; returns its unit.

        The capacity is a line, unless it is so far above that all else would be flat.
        """
        scale, has_capacity = Scale.for_sizes(highest, capacity_bytes)
        unit = {"GiB": GiB, "MiB": MiB, "KiB": KiB}[scale.unit]
        self.axes.set_ylim(0, above * scale.end_bytes / unit)
        self.axes.set_ylabel(scale.unit, fontsize=LETTERS, color=FAINT_COLOUR)
        if has_capacity and capacity_bytes is not None:
            name = f"capacity {brief_bytes(capacity_bytes)}"
            self.axes.axhline(capacity_bytes / unit, color=BAD_COLOUR, linewidth=2, label=name)
        return unit

    def show_legend(self, place: str, num_columns: int = 1, **options: Any) -> None:
        """A legend inside the axes, which stay as wide as they are."""
        legend = self.axes.legend(
            loc=place,
            ncols=num_columns,
            fontsize=SMALL_LETTERS,
            labelcolor=TEXT_COLOUR,
            facecolor="white",
            framealpha=0.85,
            edgecolor="none",
            handlelength=1.2,
            columnspacing=1.0,
            borderaxespad=0.2,
            **options,
        )
        legend.set_in_layout(False)

    def pixels(self) -> npt.NDArray[np.uint8]:
        """The picture, of shape (height, width, 3)."""
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.text import Text

        for text in self.figure.findobj(Text):
            text.set(usetex=False, parse_math=False, fontfamily=_FONT)
        canvas: Any = FigureCanvasAgg(self.figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def shortened(text: str, num_letters: int) -> str:
    """A text that fits, cut in its middle: its ends tell names apart."""
    if len(text) <= num_letters:
        return text
    left = num_letters // 2
    return f"{text[: left - 1]}…{text[len(text) - (num_letters - left) :]}"
