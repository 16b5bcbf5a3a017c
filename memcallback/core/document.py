"""A document of headings, paragraphs, code and tables, rendered as console text, Markdown or HTML.

Every result that people read returns one from `document()`, so each form is written once, here.
"""

from __future__ import annotations

import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain, zip_longest
from typing import TypeAlias, TypeVar

from memcallback.core.units import format_bytes
from memcallback.core.visible import visible

#: Columns of a console to which paragraphs are filled.
_WIDTH = 100
_INDENT = "  "
#: Between two columns of a table on a console.
_GAP = "  "
UNKNOWN = "n/a"
#: A notebook's own style aligns all cells alike.
_NOTEBOOK_STYLE = (
    "<style>.memcallback caption,.memcallback th.left,.memcallback td.left,"
    ".memcallback td:first-child{text-align:left}</style>"
)
_Row = TypeVar("_Row")


class Printable:
    """Mixin: `print` and notebooks show the document; nested in other values `repr` is used."""

    def document(self) -> Document:
        """What people read of it."""
        raise NotImplementedError

    def to_text(self) -> str:
        """Text for a console, at most 100 columns wide but for tables and code."""
        return self.document().text()

    def to_markdown(self) -> str:
        """GitHub's Markdown, for TensorBoard and files."""
        return self.document().markdown()

    def to_notebook_html(self) -> str:
        """Elements for the output of a notebook's cell."""
        return f'<div class="memcallback">{_NOTEBOOK_STYLE}{self.document().html()}</div>'

    def __str__(self) -> str:
        return self.to_text().rstrip("\n")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """IPython asks for this first, whatever `repr` a class has."""
        return {"text/plain": str(self), "text/html": self.to_notebook_html()}


class Document:
    """Blocks in the order in which they are read; a plain string is a paragraph."""

    def __init__(self, *parts: Block | Document | str) -> None:
        self.blocks: tuple[Block, ...] = tuple(chain.from_iterable(map(_blocks, parts)))

    def text(self) -> str:
        """Lines for a console, with blank lines around tables and before headings."""
        lines: list[str] = []
        for position, block in enumerate(self.blocks):
            neighbours = self.blocks[max(0, position - 1) : position + 1]
            if position and (
                isinstance(block, Heading)
                or any(isinstance(neighbour, Table) for neighbour in neighbours)
            ):
                lines.append("")
            lines += block.text_lines()
        return "\n".join([*lines, ""])

    def markdown(self) -> str:
        """GitHub's Markdown, without a newline at the end."""
        return "\n\n".join(block.markdown() for block in self.blocks)

    def html(self) -> str:
        """Elements for the body of a page; every text is escaped."""
        return "\n".join(block.html() for block in self.blocks)


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is that of the document."""

    text: str
    level: int = 2

    def text_lines(self) -> list[str]:
        """The heading, as wide as it is."""
        return [self.text]

    def markdown(self) -> str:
        """A line with as many number signs as its level."""
        return f"{'#' * self.level} {self.text}"

    def html(self) -> str:
        """An `h1` to `h6`."""
        return f"<h{self.level}>{escape(self.text)}</h{self.level}>"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, indented on a console by so many levels."""

    text: str
    indent: int = 0

    def text_lines(self) -> list[str]:
        """Filled lines; the second and later ones are indented by one level more."""
        indent = _INDENT * self.indent
        return textwrap.wrap(
            self.text, _WIDTH, initial_indent=indent, subsequent_indent=indent + _INDENT
        )

    def markdown(self) -> str:
        """The text as it is."""
        return self.text

    def html(self) -> str:
        """A `p`."""
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Code:
    """Lines to paste, or another program's own text, shown as they are."""

    text: str
    indent: int = 0

    def text_lines(self) -> list[str]:
        """The lines, indented."""
        return [f"{_INDENT * self.indent}{line}" for line in self.text.splitlines()]

    def markdown(self) -> str:
        """A fenced block."""
        return f"```\n{self.text}\n```"

    def html(self) -> str:
        """A `pre`."""
        return f"<pre><code>{escape(self.text)}</code></pre>"


@dataclass(frozen=True, kw_only=True)
class Table(Printable):
    """Rows of text under named columns.

    Attributes:
        title: One line or more above the table.
        columns: The names. The first column is aligned left, the others, which hold numbers, right.
        rows: As many cells as there are columns. A row with a first cell alone names the group
            below it.
        left_columns: Names of further columns to align left.
        totals: Whether the last row sums up the others and is set off from them.
        rules_after: Positions of rows after which a group ends.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_columns: frozenset[str] = field(default_factory=frozenset)
    totals: bool = False
    rules_after: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (self.columns, row)

    def document(self) -> Document:
        """The table alone."""
        return Document(self)

    def text_lines(self) -> list[str]:
        """Aligned lines, as wide as they need to be."""
        lines = [[cell.splitlines() or [""] for cell in row] for row in (self.columns, *self.rows)]
        widths = [
            max(num_cells(line) for row in lines for line in row[position])
            for position in range(len(self.columns))
        ]
        rule = for_console("─", "-") * (sum(widths) + len(_GAP) * (len(widths) - 1))
        title = (Paragraph(line).text_lines() for line in self.title.splitlines())
        text = [*chain.from_iterable(title), "", *self._aligned(lines[0], widths), f" {rule}"]
        for number, group in enumerate(self._groups(lines[1:])):
            text += [""] * (number > 0)
            for row in group:
                text.extend(self._aligned(row, widths))
        return text

    def markdown(self) -> str:
        """The title in bold above it; a totals row and a group's name are in bold."""
        rows = [
            tuple(cell.strip().replace("|", "\\|").replace("\n", "<br>") for cell in row)
            for row in self.rows
        ]
        rows = [(f"**{row[0]}**", *row[1:]) if _is_group_name(row) else row for row in rows]
        if self.totals and rows:
            rows[-1] = tuple(f"**{cell}**" if cell else "" for cell in rows[-1])
        rule = tuple(":---" if self._is_left(column) else "---:" for column in self._positions)
        title, *further = self.title.splitlines()
        lines = ["| " + " | ".join(line) + " |" for line in (self.columns, rule, *rows)]
        return "\n\n".join([f"**{title}**", *further, "\n".join(lines)])

    def html(self) -> str:
        """A `table` with a `tbody` for each group; cells aligned left have the class `left`."""
        title, *further = map(escape, self.title.splitlines())
        caption = "".join([f"<strong>{title}</strong>", *(f"<br>{line}" for line in further)])
        groups = "".join(
            f"<tbody>{''.join(map(self._html_row, group))}</tbody>"
            for group in self._groups(self.rows)
        )
        head = "".join(self._html_cells("th", self.columns))
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>{groups}</table>"

    def _html_row(self, row: tuple[str, ...]) -> str:
        if _is_group_name(row):
            colspan = len(self.columns)
            return f'<tr><th class="left" colspan="{colspan}">{escape(row[0])}</th></tr>'
        return f"<tr>{''.join(self._html_cells('td', row))}</tr>"

    def _html_cells(self, tag: str, cells: Sequence[str]) -> Iterator[str]:
        for position, cell in enumerate(cells):
            left = ' class="left"' if self._is_left(position) else ""
            yield f"<{tag}{left}>{escape(cell.strip()).replace(chr(10), '<br>')}</{tag}>"

    @property
    def _positions(self) -> range:
        return range(len(self.columns))

    def _is_left(self, position: int) -> bool:
        return position == 0 or self.columns[position] in self.left_columns

    def _groups(self, rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
        """The rows between two ends of groups."""
        totals = {len(rows) - 2} if self.totals else set()
        ends = sorted(end + 1 for end in {*self.rules_after, *totals} if 0 <= end < len(rows) - 1)
        for start, end in zip([0, *ends], [*ends, len(rows)], strict=True):
            yield rows[start:end]

    def _aligned(self, row: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
        """The lines of a row, each cell as wide as its column."""
        for line in zip_longest(*row, fillvalue=""):
            cells = []
            for position, (cell, width) in enumerate(zip(line, widths, strict=True)):
                missing = " " * (width - num_cells(cell))
                cells.append(cell + missing if self._is_left(position) else missing + cell)
            yield f" {_GAP.join(cells)}".rstrip()


Block: TypeAlias = Heading | Paragraph | Code | Table


def _blocks(part: Block | Document | str) -> tuple[Block, ...]:
    """The blocks of a part, without control characters: all that people read passes here."""
    if isinstance(part, Document):
        return part.blocks
    if isinstance(part, str):
        part = Paragraph(part)
    if isinstance(part, Table):
        rows = tuple(tuple(map(visible, row)) for row in part.rows)
        return (replace(part, title=visible(part.title), rows=rows),)
    return (replace(part, text=visible(part.text)),)


def _is_group_name(row: tuple[str, ...]) -> bool:
    return bool(row[0]) and not any(row[1:])


def num_cells(text: str) -> int:
    """Columns of a console that a text fills: East Asian letters two, combining accents none."""
    return sum(
        0
        if unicodedata.combining(letter)
        else 2
        if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in text
    )


def size_text(num_bytes: int | None, unknown: str = UNKNOWN) -> str:
    """A size as a table shows it, also if it is unknown."""
    return unknown if num_bytes is None else format_bytes(num_bytes)


def for_console(text: str, otherwise: str | None = None) -> str:
    """A text in the console's own letters: `otherwise`, or question marks, for those it lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    shown = visible(text).encode(encoding, "replace").decode(encoding)
    return shown if shown == text or otherwise is None else otherwise
