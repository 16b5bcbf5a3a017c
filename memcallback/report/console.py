"""Console: what a training prints, as far as `verbose` asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memcallback.core.document import for_console
from memcallback.core.validation import described
from memcallback.report.styled import Line, is_colourful, painted, plain

#: The values of `verbose`: nothing, a short report, all tables.
SILENT, BRIEF, FULL = 0, 1, 2


def check_verbose(verbose: object) -> int:
    """Return `verbose` if it is one of its three values."""
    if type(verbose) is int and verbose in (SILENT, BRIEF, FULL):
        return verbose
    raise ValueError(
        f"verbose must be 0, 1 or 2, got {described(verbose)}. Give 0 to print nothing, 1 for a "
        "short report and a line at the end, 2 for all tables."
    )


class Console:
    """Prints for one training, in the letters and colours that the console has."""

    def __init__(self, print_fn: Callable[[str], None], verbose: int) -> None:
        self._print = print_fn
        self._verbose = verbose

    def shows(self, level: int) -> bool:
        """Whether texts of a level of `verbose` are printed."""
        return self._verbose >= level

    @property
    def is_silent(self) -> bool:
        """Whether nothing is printed."""
        return not self.shows(BRIEF)

    def say(self, text: str, *, level: int = BRIEF) -> None:
        """Print a text from a level of `verbose` on."""
        if self.shows(level):
            self._print(for_console(text))

    def show(self, lines: Iterable[Line]) -> None:
        """Print lines, unless nothing is to be printed."""
        if self.shows(BRIEF):
            lines = tuple(lines)
            text = for_console(plain(lines))
            self._print(painted(lines) if is_colourful() and text == plain(lines) else text)
