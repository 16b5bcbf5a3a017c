"""Lines for a console: parts with a colour on a terminal, in the letters that it has."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from memcallback.core.document import for_console, num_cells
from memcallback.core.visible import visible

#: Columns of a line at most.
WIDTH = 100
INDENT = "  "
#: Columns of the indent and the words before a text, such as `batch size`.
_LABEL = 15


class Style(Enum):
    """How a part of a line looks on a terminal; the value is the code of ECMA-48."""

    PLAIN = ""
    BOLD = "1"
    FAINT = "2"
    GOOD = "1;32"
    BAD = "1;31"
    PEAK = "36"


class Part(NamedTuple):
    """A part of a line."""

    text: str
    style: Style = Style.PLAIN


Line = tuple[Part, ...]


class Letters(NamedTuple):
    """The letters of a report that not every console has."""

    side: str = "│"
    dot: str = "·"
    times: str = "×"  # noqa: RUF001
    filled: str = "━"
    unfilled: str = "─"
    blocks: str = "▏▎▍▌▋▊▉█"
    mark: str = "◀"
    to: str = "→"
    until: str = "…"


_ASCII = Letters("|", "-", "x", "=", "-", "#", "<", "->", "..")


def letters_here() -> Letters:
    """Those that the console has."""
    needed = "".join(Letters())
    return Letters() if for_console(needed, "") else _ASCII


def plain(lines: Iterable[Line]) -> str:
    """The text alone."""
    return "\n".join("".join(visible(part.text) for part in line).rstrip() for line in lines)


def painted(lines: Iterable[Line]) -> str:
    """The text with its colours."""
    return "\n".join("".join(map(_painted, line)).rstrip() for line in lines)


def _painted(part: Part) -> str:
    text = visible(part.text)
    return f"\x1b[{part.style.value}m{text}\x1b[0m" if part.style is not Style.PLAIN else text


def is_colourful() -> bool:
    """Whether the console is a terminal whose user wants colours (https://no-color.org)."""
    # While rich draws a progress bar for Lightning, it replaces stdout by an object of its own.
    stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    is_terminal = getattr(stdout, "isatty", lambda: False)()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width_of(line: Line) -> int:
    """Columns that a line fills."""
    return sum(num_cells(part.text) for part in line)


def fitted(text: str, width: int) -> str:
    """A text that is cut in its middle if it is wider than so many columns."""
    if num_cells(text) <= width:
        return text
    half = (width - 2) // 2
    return f"{text[: width - 2 - half]}..{text[-half:]}"


def padded(text: str, width: int) -> str:
    """A text with blanks after it up to a width."""
    return text + " " * (width - num_cells(text))


def bar(share: float, width: int, letters: Letters) -> str:
    """A bar of whole letters, filled up to a share from 0 to 1."""
    num_filled = min(width, max(0, round(share * width)))
    return letters.filled * num_filled + letters.unfilled * (width - num_filled)


def block_bar(share: float, width: int, letters: Letters) -> str:
    """A bar of blocks in parts of a letter, for a share from 0 to 1; nothing is drawn after it."""
    num_parts = len(letters.blocks)
    filled, part = divmod(round(share * width * num_parts), num_parts)
    return letters.blocks[-1] * filled + (letters.blocks[part - 1] if part else "")


def label_text(label: str) -> str:
    """The words before a text, as wide as all of them."""
    return padded(f"{INDENT}{label}", _LABEL)


def labelled(label: str, texts: Iterable[str], style: Style = Style.PLAIN) -> Iterator[Line]:
    """Sentences beside their label, wrapped."""
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH - _LABEL)]
    for number, line in enumerate(lines):
        yield (Part(label_text("" if number else label), style), Part(line))
