"""Patch a function for the current thread only."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


def thread_local_patch(target: Any, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function that answers to the thread that calls this, and does to all others what it does
    now.
    """
    own, original = threading.get_ident(), getattr(target, name)

    @functools.wraps(answer)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (answer if threading.get_ident() == own else original)(*args, **kwargs)

    return function
