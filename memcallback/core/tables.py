"""A table rendered as console text or Markdown."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

#: Between two columns of a text.
_GAP = "  "


class Printable:
    """What is shown as its text: by `print`, and where IPython or a notebook shows it as a value of
    its own; among others its `repr` is.
    """

    def to_text(self) -> str:
        """For a console; lines that end with a newline."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.to_text().rstrip("\n")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """IPython asks for this before anything else, whatever `repr` a class has."""
        return {"text/plain": str(self)}


@dataclass(frozen=True, kw_only=True)
class Table(Printable):
    """Rows of text under named columns.

    Attributes:
        title: Above it, one line or more.
        columns: The names. The first column is aligned to the left, the others, which hold figures,
            to the right.
        rows: As many cells as there are columns; an empty cell says nothing.
        left_columns: Names of further columns to align to the left.
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

    def _is_left(self, position: int) -> bool:
        return position == 0 or self.columns[position] in self.left_columns

    def to_markdown(self) -> str:
        """GitHub's Markdown, the title in bold above it; a totals row and the heading of a group, a
        row of one cell, are in bold.
        """
        rows = [tuple(cell.strip().replace("|", "\\|") for cell in row) for row in self.rows]
        rows = [(f"**{row[0]}**", *row[1:]) if row[0] and not any(row[1:]) else row for row in rows]
        if self.totals and rows:
            rows[-1] = tuple(f"**{cell}**" if cell else "" for cell in rows[-1])
        rule = tuple(
            ":---" if self._is_left(position) else "---:" for position in range(len(self.columns))
        )
        lines = [self.columns, rule, *rows]
        title, *further = self.title.splitlines()
        return "\n\n".join([f"**{title}**", *further, ""]) + "\n".join(
            "| " + " | ".join(line) + " |" for line in lines
        )

    def to_text(self) -> str:
        """Aligned text for a console, as wide as it needs to be."""
        lines = [[cell.splitlines() or [""] for cell in row] for row in (self.columns, *self.rows)]
        widths = [
            max(_num_cells(line) for row in lines for line in row[position])
            for position in range(len(self.columns))
        ]
        last = len(self.rows) - 1
        text = [
            "",
            *self._aligned(lines[0], widths),
            f" {for_console('─', '-') * (sum(widths) + len(_GAP) * (len(widths) - 1))}",
        ]
        for position, row in enumerate(lines[1:]):
            text.extend(self._aligned(row, widths))
            if position < last and (
                position in self.rules_after or (self.totals and position == last - 1)
            ):
                text.append("")
        return "\n".join([self.title, *text, ""]) + "\n"

    def _aligned(self, row: list[list[str]], widths: list[int]) -> Iterator[str]:
        """The lines of a row, each cell as wide as its column."""
        for line in zip_longest(*row, fillvalue=""):
            cells = []
            for position, (cell, width) in enumerate(zip(line, widths, strict=True)):
                missing = " " * (width - _num_cells(cell))
                cells.append(cell + missing if self._is_left(position) else missing + cell)
            yield f" {_GAP.join(cells)}".rstrip()


def _num_cells(text: str) -> int:
    """How many columns of a console a text takes: letters of East Asia two, accents that stand over
    the letter before none.
    """
    return sum(
        0
        if unicodedata.combining(letter)
        else 2
        if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in text
    )


def for_console(text: str, otherwise: str | None = None) -> str:
    """A text in letters that the console has; the others become question marks, or another text
    stands for it.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    shown = text.encode(encoding, "replace").decode(encoding)
    return shown if shown == text or otherwise is None else otherwise
