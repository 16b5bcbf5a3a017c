"""line_in(): the line of the user's program in a stack that `faulthandler` has dumped."""

from __future__ import annotations

import re

from memcallback.core.code_lines import CodeLine, is_framework, is_library, short_path

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def line_in(dump: str) -> str:
    """The innermost line of the program, else of a library; empty if there is none."""
    lines = [
        CodeLine(short_path(path), int(number), function, path)
        for path, number, function in _FRAME.findall(dump)
        if not is_framework(path)
    ]
    own = [line for line in lines if not is_library(line.path)]
    return str((own or lines)[0]) if lines else ""
