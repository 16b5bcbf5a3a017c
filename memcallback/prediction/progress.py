"""ProgressLine: says on stderr how far a prediction is, in one line that is written anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

#: Called with the number of traces done and of all.
TraceProgress = Callable[[int, int], None]
#: Seconds from one line to the next where lines stay: in a file, in a log of CI.
_INTERVAL_S = 10.0


class ProgressLine:
    """One line on a terminal or in a notebook, with an estimate; elsewhere a line every 10 s.

    It is a `progress` for `predict`, to be ended by `clear`, or by the end of a `with` block.
    """

    def __init__(
        self,
        of: str = "traces",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._of = of
        # Looked up when it is made: whoever redirects stderr means this one too.
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._start = self._last = clock()
        self._done_of_all = (0, 0)
        self._width = 0

    def say(self, text: str) -> None:
        """Show a text at once, where a line can be written anew."""
        if self._is_live():
            self._write(f"memcallback: {text}")

    def __call__(self, num_done: int, num_all: int) -> None:
        """Show how many are done."""
        self._done_of_all = (num_done, num_all)
        now = self._clock()
        if self._is_live():
            self._write(self._text(now))
        elif now - self._last >= _INTERVAL_S:
            self._last = now
            self._put(f"{self._text(now)}\n")

    def tick(self) -> None:
        """Show that time has passed."""
        self(*self._done_of_all)

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            self._write("")
            self._width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _is_live(self) -> bool:
        """Whether the line can be written anew: on a terminal, in a notebook."""
        stream = self._stream
        # What a program has put in the place of stderr may have little but `write`.
        if stream is None or getattr(stream, "closed", False):
            return False
        # A program may import ipykernel without being a notebook.
        is_notebook = type(stream).__module__.partition(".")[0] == "ipykernel"
        return is_notebook or getattr(stream, "isatty", lambda: False)()

    def _text(self, now: float) -> str:
        (num_done, num_all), elapsed_s = self._done_of_all, now - self._start
        if not num_all:
            return f"memcallback: {elapsed_s:.0f} s"
        text = f"memcallback: {num_done} of {num_all} {self._of}, {elapsed_s:.0f} s"
        if 0 < num_done < num_all:
            text += f", about {elapsed_s * (num_all - num_done) / num_done:.0f} s left"
        return text

    def _write(self, text: str) -> None:
        """Write over the line that is there; spaces take the rest of a longer one away."""
        end = "" if text else "\r"
        self._put(f"\r{text.ljust(self._width)}{end}")
        self._width = len(text)

    def _put(self, text: str) -> None:
        """Write to the stream; one that takes nothing gets no more, and the prediction goes on."""
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (AttributeError, OSError, ValueError):
            self._stream = None


def part_of(progress: TraceProgress, number: int, num_parts: int) -> TraceProgress:
    """The progress of one of several parts, each as long as the others."""
    return lambda num_done, num_all: progress(number * num_all + num_done, num_parts * num_all)
