"""Prints which training of `health_programs` gets which warnings, and how many of them are wrong or missing.

python tests/warnings_table.py [cpu | gpu]
"""

from __future__ import annotations

import sys
import tempfile

import health_programs as programs
from test_warnings import warnings_of


def main(accelerator):
    wrong = missing = 0
    for title, group in (("healthy", programs.HEALTHY), ("sick", programs.SICK)):
        for name, program in group.items():
            with tempfile.TemporaryDirectory() as folder:
                told = warnings_of(folder, program, accelerator)
            right = [text for text in told if program.names and all(word in text for word in program.names)]
            wrong += len(told) - len(right)
            missing += title == "sick" and not right
            print(f"{title:8}{name:36}{' | '.join(told) or 'no warning'}", file=sys.stderr)
    print(f"{len(programs.HEALTHY)} healthy, {len(programs.SICK)} sick: {wrong} wrong warnings, {missing} missing", file=sys.stderr)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cpu"]))
