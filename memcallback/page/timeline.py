"""The timeline of a step: its memory from allocation to allocation, stacked by category."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from memcallback.core.types import Category, Phase
from memcallback.core.units import brief_bytes
from memcallback.page.elements import SLUGS, legend, script_json
from memcallback.page.scale import Scale

#: Units of the drawing; it is stretched to the width of the page.
_WIDTH, _HEIGHT = 1000, 300
#: The share of the width that a phase needs for its whole name.
_WIDE = 0.12


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A step's memory after one of its allocations. Sizes in bytes.

    Attributes:
        by_category: What is allocated, in the order of `Category`.
        reserved_bytes: What the allocator has reserved; None on a CPU.
        size_bytes: The size of the block that is allocated.
        what: The operator that allocates it.
        where: The module that runs, and the line of the program if one runs.
    """

    by_category: tuple[int, ...]
    reserved_bytes: int | None
    size_bytes: int
    what: str
    where: str

    @property
    def allocated_bytes(self) -> int:
        """All that is allocated."""
        return sum(self.by_category)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The memory of one step.

    Attributes:
        moments: Moments in order; of allocations that share a column the one with most memory.
        phases: Each phase, with the first of its moments and the one after its last.
        num_allocations: How many allocations the step makes.
        capacity_bytes: What the allocator can have; None if unknown.
        measured: Measured peaks of allocated memory, shown beside those of the prediction.
    """

    moments: Sequence[Moment]
    phases: Sequence[tuple[Phase, int, int]]
    num_allocations: int
    capacity_bytes: int | None
    measured: Mapping[Phase, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The position of the first moment with most memory."""
        sizes = [moment.allocated_bytes for moment in self.moments]
        return sizes.index(max(sizes))

    def html(self) -> str:
        """The chart, its legend, and the data that the page's script shows at the pointer."""
        sizes = [max(moment.allocated_bytes, moment.reserved_bytes or 0) for moment in self.moments]
        highest = max([*sizes, *self.measured.values()])
        scale, has_capacity = Scale.for_sizes(highest, self.capacity_bytes)
        present = [
            position
            for position, _ in enumerate(Category)
            if any(moment.by_category[position] for moment in self.moments)
        ]
        drawing = [
            *self._phase_backgrounds(),
            *self._areas(present, scale),
            *self._reserved(scale),
            f'<line class="pointer" y1="0" y2="{_HEIGHT}" hidden/>',
        ]
        if has_capacity and self.capacity_bytes is not None:
            drawing.append(scale.line_svg("capacity", self.capacity_bytes, _WIDTH, _HEIGHT))
        return "\n".join(
            [
                '<figure class="timeline" tabindex="0" role="img" '
                f'aria-label="{escape(self._summary())}">',
                '<div class="plot">',
                scale.html(),
                f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
                'aria-hidden="true">',
                *drawing,
                "</svg>",
                *self._labels(scale),
                scale.capacity_html(self.capacity_bytes, is_drawn=has_capacity),
                "</div>",
                *self._phase_names(),
                legend([list(Category)[position] for position in present]),
                f"<script type='application/json'>{self._data()}</script>",
                "</figure>",
            ]
        )

    def _summary(self) -> str:
        moment = self.moments[self.peak]
        return (
            f"Memory over {self.num_allocations:,} allocations of a step; the peak is "
            f"{brief_bytes(moment.allocated_bytes)} at {moment.what}"
        )

    def _x(self, position: float) -> float:
        return position / len(self.moments)

    def _phase_backgrounds(self) -> Iterator[str]:
        for phase, start, stop in self.phases:
            left, right = self._x(start) * _WIDTH, self._x(stop) * _WIDTH
            yield (
                f'<rect class="{phase.value}" x="{left:.1f}" width="{right - left:.1f}" '
                f'y="0" height="{_HEIGHT}"/>'
            )

    def _areas(self, present: Sequence[int], scale: Scale) -> Iterator[str]:
        """From the top of the stack down, so that each covers the rest of the one before."""
        for number in range(len(present), 0, -1):
            below = present[:number]
            sizes = [sum(moment.by_category[one] for one in below) for moment in self.moments]
            slug = SLUGS[list(Category)[below[-1]]]
            yield f'<path class="fill {slug}" d="{self._steps(sizes, scale)}V{_HEIGHT}H0Z"/>'

    def _reserved(self, scale: Scale) -> Iterator[str]:
        sizes = [moment.reserved_bytes for moment in self.moments]
        known = [size for size in sizes if size is not None]
        if known and len(known) == len(sizes):
            yield f'<path class="reserved" d="{self._steps(known, scale)}"/>'

    def _steps(self, sizes: Sequence[int], scale: Scale) -> str:
        """A line with a step at each change."""
        parts, last = [], None
        for position, size in enumerate(sizes):
            height = f"{_HEIGHT * (1 - scale.share(size)):.1f}".removesuffix(".0")
            if height != last:
                x = f"{self._x(position) * _WIDTH:.1f}".removesuffix(".0")
                parts.append(f"M{x} {height}" if last is None else f"H{x}V{height}")
                last = height
        return "".join([*parts, f"H{_WIDTH}"])

    def _labels(self, scale: Scale) -> Iterator[str]:
        peak = self.moments[self.peak]
        x, y = self._x(self.peak + 0.5), scale.share(peak.allocated_bytes)
        side = "left" if x > 0.5 else "right"
        yield (
            f'<div class="dot" style="left:{100 * x:.2f}%;bottom:{100 * y:.2f}%"></div>'
            f'<div class="peak {side}" style="left:{100 * x:.2f}%;bottom:{100 * y:.2f}%">'
            f"<b>peak {brief_bytes(peak.allocated_bytes)}</b> {escape(peak.what)} "
            f"<span>{escape(peak.where)}</span></div>"
        )
        for phase, start, stop in self.phases:
            if phase in self.measured:
                highest = max(range(start, stop), key=lambda one: self.moments[one].allocated_bytes)
                size = self.measured[phase]
                yield (
                    f'<div class="measured" tabindex="0" data-tip="measured peak of '
                    f'{phase.label}: {brief_bytes(size)}" '
                    f'style="left:{100 * self._x(highest + 0.5):.2f}%;'
                    f'bottom:{100 * scale.share(size):.2f}%"></div>'
                )
        reserved = self.moments[-1].reserved_bytes
        if reserved is not None:
            yield (
                f'<div class="mark" style="bottom:{100 * scale.share(reserved):.2f}%">'
                f"reserved {brief_bytes(reserved)}</div>"
            )

    def _phase_names(self) -> Iterator[str]:
        yield '<div class="phases" aria-hidden="true">'
        for phase, start, stop in self.phases:
            width = self._x(stop - start)
            place = f"left:{100 * self._x(start):.2f}%;width:{100 * width:.2f}%"
            name = phase.label if width >= _WIDE else phase.label.partition(" ")[0]
            yield f'<span style="{place}" title="{phase.label}">{name}</span>'
        yield "</div>"

    def _data(self) -> str:
        """What the script shows: texts once, and a row of numbers for each moment."""
        texts: dict[str, int] = {}
        rows = [
            [
                texts.setdefault(moment.what, len(texts)),
                texts.setdefault(moment.where, len(texts)),
                moment.size_bytes,
                moment.reserved_bytes,
                *moment.by_category,
            ]
            for moment in self.moments
        ]
        data = {
            "texts": list(texts),
            "categories": [category.label for category in Category],
            "rows": rows,
        }
        return script_json(json.dumps(data, separators=(",", ":")))
