"""A table as data, and its two forms: text for a console, Markdown for TensorBoard and files."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under named columns.

    Attributes:
        title: Above it, one line or more.
        columns: The names. The first column is aligned to the left, the others, which hold figures, to the right.
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
        """GitHub's Markdown, the title in bold above it; a totals row and the heading of a group, a row of one cell, are in bold."""
        rows = [tuple(cell.strip().replace("|", "\\|") for cell in row) for row in self.rows]
        rows = [(f"**{row[0]}**", *row[1:]) if row[0] and not any(row[1:]) else row for row in rows]
        if self.totals and rows:
            rows[-1] = tuple(f"**{cell}**" if cell else "" for cell in rows[-1])
        rule = tuple(":---" if self._is_left(position) else "---:" for position in range(len(self.columns)))
        lines = [self.columns, rule, *rows]
        title, *further = self.title.splitlines()
        return "\n\n".join([f"**{title}**", *further, ""]) + "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def to_text(self) -> str:
        """Aligned text for a console, as wide as it needs to be."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for position, name in enumerate(self.columns):
            table.add_column(Text(name), justify="left" if self._is_left(position) else "right", no_wrap=True)
        for position, row in enumerate(self.rows):
            is_last_before_totals = self.totals and position == len(self.rows) - 2
            table.add_row(*(Text(cell) for cell in row), end_section=is_last_before_totals or position in self.rules_after)
        out = io.StringIO()
        Console(file=out, width=10_000, color_system=None).print(table)
        return "\n".join([self.title, *(line.rstrip() for line in out.getvalue().splitlines())]) + "\n"


def for_console(text: str) -> str:
    """A text in letters that the console has; the others become question marks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
