"""Axes: round ticks in the unit of the largest size, and sizes of three digits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memcallback.core.units import GiB, KiB, MiB, brief_bytes

#: How many steps an axis has at most.
_MOST_TICKS = 6
#: A capacity so many times the largest size is named and not drawn: all else would be flat.
_FAR = 3


@dataclass(frozen=True)
class Scale:
    """An axis of bytes that begins at 0.

    Attributes:
        end_bytes: Its end.
        step_bytes: The distance of two ticks.
        unit: The name of the unit in which ticks are written.
    """

    end_bytes: float
    step_bytes: float
    unit: str

    @classmethod
    def for_sizes(cls, num_bytes: int, capacity_bytes: int | None) -> tuple[Scale, bool]:
        """An axis for sizes up to one, and whether the capacity is on it."""
        has_capacity = capacity_bytes is not None and capacity_bytes < _FAR * num_bytes
        return cls._up_to(
            max(num_bytes, (capacity_bytes or 0) if has_capacity else 0)
        ), has_capacity

    @classmethod
    def _up_to(cls, num_bytes: int) -> Scale:
        """An axis that ends a little above a size."""
        unit, name = next(
            ((unit, name) for unit, name in ((GiB, "GiB"), (MiB, "MiB")) if num_bytes >= unit),
            (KiB, "KiB"),
        )
        end = max(num_bytes * 1.06, 1.0)
        return cls(end, round_step(end / unit) * unit, name)

    def share(self, num_bytes: float) -> float:
        """Where a size is on the axis, from 0 to 1."""
        return num_bytes / self.end_bytes

    def html(self) -> str:
        """The unit and the ticks, as lines across the plot."""
        unit = {"GiB": GiB, "MiB": MiB, "KiB": KiB}[self.unit]
        ticks = [
            tick * self.step_bytes for tick in range(int(self.end_bytes / self.step_bytes) + 1)
        ]
        lines = (
            f'<div class="tick" style="bottom:{100 * self.share(tick):.2f}%"><span>'
            f"{tick / unit:,g}</span></div>"
            for tick in ticks
        )
        return f'<div class="unit">{self.unit}</div>{"".join(lines)}'

    def capacity_html(self, capacity_bytes: int | None, *, is_drawn: bool) -> str:
        """The name of the capacity, at its height or above the plot."""
        if capacity_bytes is None:
            return ""
        bottom = 100 * self.share(capacity_bytes) if is_drawn else 100
        text = f"capacity {brief_bytes(capacity_bytes)}{'' if is_drawn else ', far above'}"
        return f'<div class="mark capacity" style="bottom:{bottom:.2f}%">{text}</div>'

    def line_svg(self, kind: str, num_bytes: int, width: int, height: int) -> str:
        """A line across a drawing at a size."""
        y = height * (1 - self.share(num_bytes))
        return f'<line class="{kind}" x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>'


def round_step(length: float) -> float:
    """The distance of ticks on an axis of a length: 1, 2 or 5 times a power of ten."""
    least = length / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)
