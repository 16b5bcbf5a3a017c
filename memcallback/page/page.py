"""Page: a self-contained HTML page, with the verdict first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Protocol

#: Pixels of a page inside a notebook.
_NOTEBOOK_HEIGHT = 900


class Part(Protocol):
    """A chart, a table or a document."""

    def html(self) -> str:
        """Elements for the body of a page."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page under a heading.

    Attributes:
        title: The heading.
        parts: What is below it, in order.
        note: How to read it; may be empty.
        is_folded: Whether the reader opens it first.
    """

    title: str
    parts: Sequence[Part]
    note: str = ""
    is_folded: bool = False

    def html(self) -> str:
        """The section's elements."""
        parts = "\n".join(part.html() for part in self.parts)
        if self.is_folded:
            return (
                f"<section><details><summary>{escape(self.title)}</summary>{parts}</details>"
                "</section>"
            )
        note = f" <small>{escape(self.note)}</small>" if self.note else ""
        return f"<section><h2>{escape(self.title)}{note}</h2>\n{parts}</section>"


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        title: What was predicted or measured, where.
        verdict: The answer, one sentence each; the first is written in bold.
        is_good: Whether the answer is the one hoped for; None if there is none.
        sections: What shows it, in the order in which it is read.
    """

    title: str
    verdict: Sequence[str]
    is_good: bool | None
    sections: Sequence[Section]

    def html(self) -> str:
        """The whole page; it loads nothing."""
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{_file('style.css')}</style>\n</head>\n"
            f"<body>\n{self._body()}\n<script>\n{_file('script.js')}</script>\n</body>\n</html>\n"
        )

    def notebook_html(self) -> str:
        """The page in a frame of its own, which keeps its styles from those of the notebook."""
        return (
            f'<iframe srcdoc="{escape(self.html())}" title="{escape(self.title)}" '
            f'style="width:100%;height:{_NOTEBOOK_HEIGHT}px;border:0"></iframe>'
        )

    def _body(self) -> str:
        first, *further = self.verdict
        kind = {True: "good", False: "bad", None: "unknown"}[self.is_good]
        lines = "".join(f"<p>{escape(sentence)}</p>" for sentence in further)
        sections = "\n".join(section.html() for section in self.sections)
        return (
            f"<main>\n<h1>{escape(self.title)}</h1>\n"
            f'<div class="verdict {kind}"><p><strong>{escape(first)}</strong></p>{lines}</div>\n'
            f'{sections}\n</main>\n<div id="tip" role="status" hidden></div>'
        )


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
