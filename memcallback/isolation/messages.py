"""What a child and its parent send each other: messages through a pipe, and errors."""

from __future__ import annotations

import os
import pickle
import select
import struct
import traceback
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("!I")


def send(descriptor: int, kind: str, value: object = None) -> None:
    """Write a message whole, if its reader is still there."""
    content = pickle.dumps((kind, value))
    left = memoryview(_LENGTH.pack(len(content)) + content)
    while left:
        left = left[os.write(descriptor, left) :]


class MessageReader:
    """Reads messages from a pipe that does not block.

    Attributes:
        is_at_end: Whether the writer has gone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._content = b""
        self.is_at_end = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come that is not read."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not self._content and not any(events & select.POLLIN for _, events in poll.poll(0))

    def next(self) -> tuple[str, Any] | None:
        """The next message; None if no whole one has come."""
        while not (message := self._first()):
            try:
                part = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return None
            if not part:
                self.is_at_end = True
                return None
            self._content += part
        return message

    def _first(self) -> tuple[str, Any] | None:
        if len(self._content) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._content)
        end = _LENGTH.size + length
        if len(self._content) < end:
            return None
        content, self._content = self._content[_LENGTH.size : end], self._content[end:]
        message: tuple[str, Any] = pickle.loads(content)
        return message


class ChildTraceback(Exception):
    """The traceback of an error in another process, as text; the last cause of that error."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class SentError:
    """An error and its causes, outermost first, with their traceback as text."""

    errors: tuple[BaseException, ...]
    notes: tuple[tuple[str, ...], ...]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> SentError:
        """The error, as far as it can be pickled."""
        chain = [error]
        while (cause := chain[-1].__cause__) is not None and cause not in chain:
            chain.append(cause)
        return cls(
            tuple(map(_picklable, chain)),
            tuple(tuple(getattr(each, "__notes__", ())) for each in chain),
            "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        )

    def restored(self) -> BaseException:
        """The first error, with its causes."""
        cause: BaseException = ChildTraceback(self.text)
        for error, notes in zip(reversed(self.errors), reversed(self.notes), strict=True):
            error.__cause__ = cause
            if notes:
                error.__notes__ = list(notes)
            cause = error
        return cause


def _picklable(error: BaseException) -> BaseException:
    """The error without what hangs on it, or its class and text as a RuntimeError."""
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return copy
    except Exception:  # classes of the user's pickle as they like
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
