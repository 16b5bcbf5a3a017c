"""PredictionError, MemoryWarning, and `fail_safe`, which keeps our errors out of the training."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from memcallback.core.interruptions import ENDS, PassOver, raise_if_meant
from memcallback.core.visible import visible


class MemoryWarning(UserWarning):
    """A problem with a training's memory, or with recording, predicting or logging it.

    The training goes on.
    """


def warn(text: str) -> None:
    """Warn with a `MemoryWarning`."""
    warnings.warn(visible(text), MemoryWarning, stacklevel=3)


def warn_and_go_on(text: str) -> None:
    """Warn inside a training or while an error propagates; silent where warnings are errors."""
    with PassOver():  # also where a warning cannot be shown, as on a closed stderr
        warnings.warn(visible(text), MemoryWarning, stacklevel=3)


class PredictionError(RuntimeError):
    """A step's memory cannot be predicted; the message says why, where, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


class CompiledCodeError(PredictionError):
    """A step hands memory to compiled code, and a prediction has none to give."""


class MissingPartError(PredictionError):
    """The installed PyTorch or Lightning lacks a private part that was about to be used."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def fail_safe(hook: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorate a method that training calls: its first error is warned of and ends recording.

    What a signal brings goes on: Ctrl-C and time limits are meant for the training.
    """

    @functools.wraps(hook)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        owner: Any = args[0]
        if owner._is_broken:
            return None
        try:
            return hook(*args, **kwargs)
        except ENDS as error:  # we may fail in any way, and a logger may want to end the program
            raise_if_meant(error)
            owner._is_broken = True
            with PassOver():  # what has failed may fail again when it is closed
                owner._release()
            warn_and_go_on(
                f"{type(owner).__name__} has stopped recording: {type(error).__name__} in "
                f"{hook.__name__}: {str(error).rstrip('.')}. Training goes on without it."
            )
        return None

    return guarded


@contextmanager
def faults_as_warnings(lost: str, *meant: type[Exception]) -> Iterator[None]:
    """Warn of what is lost by an error of ours; errors of kinds that are meant for the user go on.

    For what a `fail_safe` method cannot do: raise, or return a value of its own.
    """
    try:
        yield
    except meant:
        raise
    except ENDS as error:  # we may fail in any way, and training goes on
        raise_if_meant(error)
        warn_and_go_on(f"{lost} {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """An error's message as a sentence; the class comes first unless it is a PredictionError."""
    text = str(error).strip().rstrip(".")
    return f"{text}." if isinstance(error, PredictionError) else f"{type(error).__name__}: {text}."
