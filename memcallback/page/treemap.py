"""A treemap: boxes in boxes, as large as the memory that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memcallback.core.types import Category
from memcallback.core.units import brief_bytes
from memcallback.page.elements import SLUGS

#: The size in pixels for which boxes are shaped and labelled; the page may be narrower.
_WIDTH, _HEIGHT = 1060.0, 340.0
#: Pixels of a label above the boxes inside.
_LABEL = 18.0
#: Pixels that a box needs to be labelled, and to show the boxes inside.
_LEAST_WIDTH, _LEAST_HEIGHT = 56.0, 16.0
#: Boxes inside another; further ones share the last.
_MOST_BOXES = 24
#: Shares of a whole below this are not drawn alone.
_LEAST_SHARE = 0.002


@dataclass(frozen=True, kw_only=True)
class Node:
    """A box.

    Attributes:
        name: Its label.
        num_bytes: Its memory: that of all boxes inside.
        detail: What else the pointer shows.
        category: The category that colours it; None for one with boxes inside.
        children: The boxes inside.
    """

    name: str
    num_bytes: int
    detail: str = ""
    category: Category | None = None
    children: tuple[Node, ...] = ()


@dataclass(frozen=True)
class _Box:
    """Where a node is drawn, in pixels."""

    node: Node
    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class Treemap:
    """A treemap of a root, which is not drawn itself."""

    root: Node

    def html(self) -> str:
        """The boxes, positioned in percent of the one around them."""
        boxes = "".join(self._boxes(self.root, _WIDTH, _HEIGHT))
        return f'<figure class="treemap">{boxes}</figure>'

    def _boxes(self, node: Node, width: float, height: float) -> Iterator[str]:
        for box in _squarified(_with_rest(node, self.root.num_bytes), width, height):
            yield self._box(box, width, height)

    def _box(self, box: _Box, width: float, height: float) -> str:
        node = box.node
        place = (
            f"left:{100 * box.left / width:.2f}%;top:{100 * box.top / height:.2f}%;"
            f"width:{100 * box.width / width:.2f}%;height:{100 * box.height / height:.2f}%"
        )
        size = brief_bytes(node.num_bytes)
        share = 100 * node.num_bytes / self.root.num_bytes
        tip = escape(f"{node.name}\n{size}, {share:.1f} % of the peak\n{node.detail}".strip())
        has_label = box.width > _LEAST_WIDTH and box.height > _LEAST_HEIGHT
        # Operators break at their underscores; names of groups have one line.
        name = escape(node.name) if node.children else escape(node.name).replace("_", "_<wbr>")
        label = f"<b>{name}</b> {size}" if has_label else ""
        kind = SLUGS[node.category] if node.category else "group"
        inner = ""
        if node.children and has_label and box.height > 2 * _LABEL:
            boxes = "".join(self._boxes(node, box.width, box.height - _LABEL))
            inner = f'<div class="in">{boxes}</div>'
        elif node.children:
            kind = SLUGS[_main_category(node)]
        return (
            f'<div class="box {kind}" tabindex="0" style="{place}" data-tip="{tip}">'
            f'<div class="name">{label}</div>{inner}</div>'
        )


def _main_category(node: Node) -> Category:
    """The category of most memory in a box."""
    sizes: dict[Category, int] = {}
    pending = [node]
    while pending:
        one = pending.pop()
        pending += one.children
        if one.category:
            sizes[one.category] = sizes.get(one.category, 0) + one.num_bytes
    return max(sizes, key=lambda category: sizes[category])


def _with_rest(node: Node, total_bytes: int) -> list[Node]:
    """The boxes inside, the largest first; those too small or too many are one."""
    children = sorted(node.children, key=lambda child: -child.num_bytes)
    least = _LEAST_SHARE * total_bytes
    num_shown = sum(child.num_bytes >= least for child in children[:_MOST_BOXES])
    shown, rest = children[:num_shown], children[num_shown:]
    if len(rest) == 1:
        return children
    if rest:
        together = Node(
            name=f"{len(rest)} more",
            num_bytes=sum(child.num_bytes for child in rest),
            detail=", ".join(child.name for child in rest[:8]),
            category=_main_category(Node(name="", num_bytes=0, children=tuple(rest))),
        )
        shown.append(together)
    return [child for child in shown if child.num_bytes]


def _squarified(nodes: Sequence[Node], width: float, height: float) -> Iterator[_Box]:
    """Boxes near to squares.

    Source: Bruls, Huizing, van Wijk, "Squarified Treemaps" (2000): nodes in order fill a row along
    the shorter side as long as that makes its worst box squarer.
    """
    left = top = 0.0
    pending = list(nodes)
    scale = width * height / max(1, sum(node.num_bytes for node in pending))
    while pending:
        side = min(width - left, height - top)
        row = [pending.pop(0)]
        while pending and _worst([*row, pending[0]], side, scale) <= _worst(row, side, scale):
            row.append(pending.pop(0))
        thickness = sum(node.num_bytes for node in row) * scale / side if side > 0 else 0.0
        is_column = width - left >= height - top
        start = top if is_column else left
        for node in row:
            length = node.num_bytes * scale / thickness if thickness else 0.0
            yield (
                _Box(node, left, start, thickness, length)
                if is_column
                else _Box(node, start, top, length, thickness)
            )
            start += length
        left, top = (left + thickness, top) if is_column else (left, top + thickness)


def _worst(row: Sequence[Node], side: float, scale: float) -> float:
    """The largest ratio of sides of the boxes in a row."""
    area = sum(node.num_bytes for node in row) * scale
    sizes = [node.num_bytes * scale for node in row]
    if not min(sizes) or not side:
        return float("inf")
    return max(side**2 * max(sizes) / area**2, area**2 / (side**2 * min(sizes)))
