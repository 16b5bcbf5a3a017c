"""Shows control characters in other people's texts, such as module names, as escapes."""

from __future__ import annotations

import re

#: Control characters, but for tabs and line ends, and marks that reorder letters or end lines: a
#: terminal obeys them, so a name could clear it or hide other text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """A text of one line or more with its control characters as escapes."""
    return _CONTROLS.sub(lambda match: _escape(match[0]), text)


def visible_name(name: str) -> str:
    """A name as one line: what cannot be printed is an escape."""
    if name.isprintable():
        return name
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in name)


def _escape(text: str) -> str:
    return text.encode("unicode_escape").decode()
