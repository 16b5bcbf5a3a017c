"""Small charts: a curve over batch sizes or steps, and bars of savings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from memcallback.core.types import Category
from memcallback.core.units import brief_bytes
from memcallback.page.elements import SLUGS
from memcallback.page.scale import Scale, round_step

_WIDTH, _HEIGHT = 1000, 300


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart.

    Attributes:
        name: Its name.
        points: Its points: a number on the horizontal axis, and bytes.
        kind: The class of its colour.
    """

    name: str
    points: Sequence[tuple[int, int]]
    kind: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A labelled point of a chart."""

    name: str
    x: int
    num_bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over whole numbers, on linear axes that begin at 0.

    Attributes:
        lines: The lines.
        x_name: The name of the horizontal axis.
        marks: Labelled points.
        capacity_bytes: The device's capacity, drawn if it is not far above; None if unknown.
    """

    lines: Sequence[Line]
    x_name: str
    marks: Sequence[Mark] = ()
    capacity_bytes: int | None = None

    def html(self) -> str:
        """The chart."""
        points = [point for line in self.lines for point in line.points]
        end = max((x for x, _ in points), default=1) or 1
        highest = max(size for _, size in points)
        scale, has_capacity = Scale.for_sizes(highest, self.capacity_bytes)
        drawing = [self._path(line, end, scale) for line in self.lines]
        if has_capacity and self.capacity_bytes is not None:
            drawing.append(scale.line_svg("capacity", self.capacity_bytes, _WIDTH, _HEIGHT))
        return "\n".join(
            [
                '<figure class="lines"><div class="plot">',
                scale.html(),
                f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
                f'aria-hidden="true">{"".join(drawing)}</svg>',
                *self._marks(end, scale),
                scale.capacity_html(self.capacity_bytes, is_drawn=has_capacity),
                "</div>",
                *self._x_axis(end),
                self._legend(),
                "</figure>",
            ]
        )

    def _path(self, line: Line, end: int, scale: Scale) -> str:
        points = " ".join(
            f"{_WIDTH * x / end:.1f},{_HEIGHT * (1 - scale.share(size)):.1f}"
            for x, size in line.points
        )
        return f'<polyline class="{line.kind}" points="{points}"/>'

    def _marks(self, end: int, scale: Scale) -> Iterator[str]:
        for mark in self.marks:
            place = f"--x:{100 * mark.x / end:.2f}%;bottom:{100 * scale.share(mark.num_bytes):.2f}%"
            text = f"{mark.name} {mark.x:,}: {brief_bytes(mark.num_bytes)}"
            # A curve that rises leaves room above it on the left, and below it on the right. The
            # capacity is just above the largest, so that one's name is below.
            side = "above" if mark.kind == "now" and 3 * mark.x > end else "below"
            yield (
                f'<div class="dot {mark.kind}" tabindex="0" data-tip="{escape(text)}" '
                f'style="{place}"></div>'
                f'<div class="label {side} {mark.kind}" style="{place}">{escape(text)}</div>'
            )

    def _x_axis(self, end: int) -> Iterator[str]:
        step = max(1, round(round_step(end)))
        yield '<div class="x-axis">'
        for number in range(0, end + 1, step):
            yield f'<span style="left:{100 * number / end:.2f}%">{number:,}</span>'
        yield f'</div><div class="x-name">{escape(self.x_name)}</div>'

    def _legend(self) -> str:
        if len(self.lines) < 2:
            return ""
        items = "".join(
            f'<span><i class="{line.kind}"></i>{escape(line.name)}</span>' for line in self.lines
        )
        return f'<div class="legend">{items}</div>'


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A saving: the peak with it.

    Attributes:
        name: The saving.
        num_bytes: The peak with it.
        note: What it costs, and up to which batch size it fits.
        line: The line to paste; may be empty.
    """

    name: str
    num_bytes: int
    note: str
    line: str


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Savings in groups, each beside the present peak.

    Attributes:
        groups: The name of each group, and its bars.
        present_bytes: The peak without any.
    """

    groups: Sequence[tuple[str, Sequence[Bar]]]
    present_bytes: int

    def html(self) -> str:
        """A table of bars."""
        most = max(
            [self.present_bytes, *(bar.num_bytes for _, bars in self.groups for bar in bars)]
        )
        present = Bar(name="as it is", num_bytes=self.present_bytes, note="", line="")
        rows = [self._row(present, most, "now")]
        for name, bars in self.groups:
            if bars:
                rows.append(f'<tr><th class="left" colspan="4">{escape(name)}</th></tr>')
                rows += [self._row(bar, most) for bar in bars]
        return f'<table class="bars"><tbody>{"".join(rows)}</tbody></table>'

    def _row(self, bar: Bar, most: int, kind: str = "saving") -> str:
        line = f"<code>{escape(bar.line)}</code>" if bar.line else ""
        share = f"--share:{bar.num_bytes / most:.3f}"
        return (
            f'<tr><td class="left">{escape(bar.name)}</td><td class="bar">'
            f'<i class="{kind}" style="{share}"></i>{brief_bytes(bar.num_bytes)}</td>'
            f"<td>{escape(bar.note)}</td><td>{line}</td></tr>"
        )


@dataclass(frozen=True)
class CategoryBars:
    """What is in memory by category; it adds up to the last row."""

    sizes: Mapping[Category, int]

    def html(self) -> str:
        """A table of bars, the largest first."""
        total = sum(self.sizes.values())
        rows = "".join(
            self._row(category, size, size / total)
            for category, size in sorted(self.sizes.items(), key=lambda item: -item[1])
        )
        return (
            f'<table class="categories"><tbody>{rows}</tbody><tfoot><tr><th class="left">all</th>'
            f"<th></th><th>{brief_bytes(total)}</th><th>100 %</th></tr></tfoot></table>"
        )

    def _row(self, category: Category, num_bytes: int, share: float) -> str:
        slug = SLUGS[category]
        return (
            f'<tr><td class="left"><i class="{slug}"></i>{category.label}</td><td class="bar">'
            f'<i class="{slug}" style="width:{100 * share:.1f}%"></i></td>'
            f"<td>{brief_bytes(num_bytes)}</td><td>{100 * share:.1f} %</td></tr>"
        )
