"""A hook of mkdocs: put a result where a page asks for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- result FOLDER/FILE.md -->` by that page of `benchmarks/results`, untitled."""
    return re.sub(
        r"^<!-- result (\S+) -->$",
        lambda match: _result(match[1]),
        markdown,
        flags=re.MULTILINE,
    )


def _result(page: str) -> str:
    text = (_RESULTS / page).read_text(encoding="utf-8")
    return text.partition("\n")[2].strip()
