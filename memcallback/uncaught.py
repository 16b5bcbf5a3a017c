"""Errors that nothing catches: the last chance to say what memory held, where a loop tells of no error."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol


class ErrorListener(Protocol):
    """What is told of an error that ends the program."""

    def failed(self, error: BaseException | None) -> None:
        """The error, before Python prints it."""


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_listeners: list[weakref.ref[ErrorListener]] = []
_before: _Hook | None = None


def listen(listener: ErrorListener) -> Callable[[], None]:
    """Tell somebody of an error that ends the program, through `sys.excepthook`, which does afterwards what it did before.

    Args:
        listener: Is held weakly.

    Returns:
        Ends that; the hook is put back if it is still ours.
    """
    global _before
    reference = weakref.ref(listener)
    if sys.excepthook is not _tell:
        _before, sys.excepthook = sys.excepthook, _tell
    _listeners.append(reference)

    def end() -> None:
        global _before
        if reference in _listeners:
            _listeners.remove(reference)
        if not _listeners and sys.excepthook is _tell and _before is not None:
            sys.excepthook, _before = _before, None

    return end


def _tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    for reference in tuple(_listeners):
        listener = reference()
        with suppress(Exception):  # the error itself is printed below
            if listener is not None:
                listener.failed(error)
    before = sys.__excepthook__ if _before is None else _before
    before(kind, error, traceback)
