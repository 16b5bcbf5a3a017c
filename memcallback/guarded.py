"""An error of ours ends the recording, not the training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from memcallback.warn import warn_and_go_on

_P = ParamSpec("_P")
_R = TypeVar("_R")


def never_stops_training(hook: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """A method that training calls: an error in it is told once, as a warning, and from then on nothing is recorded.

    Args:
        hook: A method of an object with an attribute `_is_broken`, and a method `_release` that takes back all its hooks.

    Returns:
        The method; it gives None where the object is broken.
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
