"""What signals do in a search: they end it with everything restored, and act afterwards.

By handlers and not by a mask: Python runs handlers in the main thread, whichever thread of
PyTorch's gets the signal. In another thread there is nothing to do, for the same reason.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class _Terminated(BaseException):
    """A SIGTERM arrived. As with KeyboardInterrupt, a step's `except Exception` lets it pass."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let a SIGTERM end the context, and act at its end.

    By itself it would end the process with files and worker processes of the trial left behind, and
    a handler of the user's would see, and perhaps save, a training in the middle of a trial.
    Lightning's own handlers come later than a search.
    """
    before = _handlers()
    is_terminated = False

    def end(number: int, frame: object) -> None:
        raise _Terminated

    try:
        if before.get(signal.SIGTERM, signal.SIG_IGN) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, end)
        yield
    except _Terminated:
        is_terminated = True
    finally:
        _set(before)  # that of SIGINT too: Lightning ignores it once it was received
    if is_terminated:
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError(
            "A SIGTERM ended the search for a batch size, and the program's own handler let the "
            "program go on. Everything is as before the search."
        )


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM act at the end of the context."""
    received: list[int] = []
    before = _handlers()
    try:
        _set(dict.fromkeys(before, lambda number, frame: received.append(number)))
        yield
    finally:
        _set(before)
        for number in received:
            signal.raise_signal(number)


def _handlers() -> dict[int, Any]:
    """The handlers that can be replaced: those of Python's, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in _NUMBERS}
    return {number: handler for number, handler in found.items() if handler is not None}


def _set(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
