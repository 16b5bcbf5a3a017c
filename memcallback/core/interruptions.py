"""Distinguishes errors raised by a signal, which end the training, from errors in our own calls."""

from __future__ import annotations

import dis
import signal
from collections.abc import Callable, Iterator
from functools import partial
from inspect import unwrap
from types import CodeType, TracebackType

#: What a logger, or a user's code that we run besides the training, may raise to end a program.
#: Caught with `raise_if_meant`, since Ctrl-C and time limits arrive in our calls too.
ENDS = (Exception, SystemExit, KeyboardInterrupt)


def raise_if_meant(error: BaseException) -> None:
    """Raise an error again that a signal brought: it would have come without us too."""
    if _is_from_signal(error):
        raise error


class PassOver:
    """A context that goes on after an error in it, unless a signal brought that."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return isinstance(error, Exception) and not _is_from_signal(error)


def _is_from_signal(error: BaseException) -> bool:
    """Whether a signal handler raised an error, in whatever code it interrupted.

    A scheduler's time limit is such an error, of any class. Python's own handler of Ctrl-C has no
    frame, but it interrupts between or inside calls: a `KeyboardInterrupt` that no `raise`
    statement made is taken for a real one.
    """
    remember_handlers()
    handlers = _remembered
    frames = list(_frames(error.__traceback__))
    if any(frame.tb_frame.f_code in handlers for frame in frames):
        return True
    if not isinstance(error, KeyboardInterrupt) or not frames:
        return isinstance(error, KeyboardInterrupt)
    innermost = frames[-1]
    number = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return dis.opname[number] != "RAISE_VARARGS"


#: The code of all signal handlers that were there when we looked. One that has run may be gone.
_remembered: set[CodeType] = set()


def remember_handlers() -> None:
    """Know the signal handlers of now later, too: one may take itself away before it raises."""
    _remembered.update(_handlers())


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


#: As Python's C code has it: `signal.getsignal` itself makes an enumeration of each answer, for
#: many times as long.
_handler_of: Callable[[int], object] = unwrap(signal.getsignal)
_NUMBERS = tuple(map(int, signal.valid_signals()))


def _handlers() -> Iterator[CodeType]:
    """The code of the signal handlers that are written in Python."""
    for handler in map(_handler_of, _NUMBERS):
        if handler is None or isinstance(handler, int):  # of C, or none
            continue
        while isinstance(handler, partial):
            handler = handler.func
        methods = (vars(kind).get("__call__") for kind in type(handler).__mro__)
        for function in (handler, *methods):
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield code
