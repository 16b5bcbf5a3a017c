"""Hooks of mkdocs: put the help of each command where the page asks for it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memcallback.cli import main  # (plain Python: building the site needs no PyTorch)

_WIDTH = "96"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- help COMMAND -->` by what `memcallback COMMAND --help` prints."""
    return re.sub(
        r"^<!-- help (\S+) -->$",
        lambda match: f"```text\n{_help(match[1])}```",
        markdown,
        flags=re.MULTILINE,
    )


def _help(command: str) -> str:
    out = io.StringIO()
    os.environ["COLUMNS"] = _WIDTH
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return out.getvalue()
