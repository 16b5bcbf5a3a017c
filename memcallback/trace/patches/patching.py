"""Replaces attributes of PyTorch and of other libraries until the end of a context."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from memcallback.core.errors import PredictionError

F = TypeVar("F", bound=Callable[..., Any])
#: An owner (a module or class), the name of an attribute, and the replacement.
Patch = tuple[Any, str, Any]
#: Functions that replace others now, and what each replaces.
_replaced: dict[Callable[..., Any], Any] = {}


_COMPILES_ORIGINAL = "_memcallback_compiles_original"


def original_if_compiled(replacement: F) -> F:
    """Mark a replacement that torch.compile does not see: it compiles the original."""
    setattr(replacement, _COMPILES_ORIGINAL, True)
    return replacement


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply patches one after the other, and undo them at the end.

    A replaced function is replaced for this thread alone. A replaced class, property or list is
    replaced for all threads.
    """
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            if not hasattr(owner, name):
                raise PredictionError(
                    f"A step cannot be traced with PyTorch {torch.__version__}, which has no "
                    f"{owner.__name__}.{name}. Install a version that memcallback is tested with "
                    "(docs/versions.md)."
                )
            # An inherited attribute is replaced in the class itself, and removed from it again.
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            if callable(replacement) and not isinstance(replacement, type):
                original = getattr(owner, name)
                replacement = in_this_thread(replacement, original)
                _replaced[replacement] = original
                stack.callback(_replaced.pop, replacement)
            setattr(owner, name, replacement)
        yield


def in_this_thread(
    replacement: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Call the replacement in the thread that is running now, and the original in all others."""
    thread, compiles_original = threading.get_ident(), hasattr(replacement, _COMPILES_ORIGINAL)

    @functools.wraps(replacement)
    def function(*args: Any, **kwargs: Any) -> Any:
        if compiles_original and torch.compiler.is_compiling():
            return original(*args, **kwargs)
        run = replacement if threading.get_ident() == thread else original
        return run(*args, **kwargs)

    return function


def replacements() -> Iterator[tuple[Callable[..., Any], Any]]:
    """Each function that replaces another now, and PyTorch's own that was there at first."""
    for function, original in tuple(_replaced.items()):
        while original in _replaced:
            original = _replaced[original]
        yield function, original
