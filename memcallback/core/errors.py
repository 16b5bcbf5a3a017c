"""PredictionError, MemoryWarning, warn(), and the decorator that keeps our errors out of the
training.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar


class MemoryWarning(UserWarning):
    """Something keeps memcallback from recording, predicting or logging, or is wrong with the
    memory of a training, which goes on.
    """


def warn(text: str) -> None:
    """Warn with a `MemoryWarning`."""
    warnings.warn(text, MemoryWarning, stacklevel=3)


def warn_and_go_on(text: str) -> None:
    """The same in the middle of a training or of an error that goes on; where warnings are errors,
    nothing is said.
    """
    with suppress(MemoryWarning):
        warnings.warn(text, MemoryWarning, stacklevel=3)


class PredictionError(RuntimeError):
    """A step's memory cannot be predicted; the text says what stopped it, where, and the way out."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def fail_safe(hook: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """A method that training calls: an error in it is told once, as a warning, and from then on
    nothing is recorded.
    """

    @functools.wraps(hook)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        owner: Any = args[0]
        if owner._is_broken:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            owner._is_broken = True
            with suppress(Exception):
                owner._release()
            text = f"{type(owner).__name__} has stopped recording: {type(error).__name__} in {hook.__name__}: {str(error).rstrip('.')}."
            warn_and_go_on(f"{text} Training goes on without it.")
        return None

    return guarded


def reason_of(error: Exception) -> str:
    """What went wrong; an error of ours says it in words, another one needs its name."""
    text = str(error).strip().rstrip(".")
    return f"{text}." if isinstance(error, PredictionError) else f"{type(error).__name__}: {text}."
