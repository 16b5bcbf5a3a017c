"""`Hook`: what we put on modules, optimizers and nodes of autograd; hooks on modules are taken back where PyTorch is not walking through them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from memcallback.code_lines import frames_of


class Hook:
    """Calls a function and gives PyTorch nothing back.

    In a copy of what it is on, which may be pickled, it does nothing; nor does it where a module is compiled with its hooks.

    Args:
        function: Called with what the hook is called with.
    """

    def __init__(self, function: Callable[..., object] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """As PyTorch calls hooks."""
        if not torch.compiler.is_compiling() and self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


#: What could not be taken back yet.
_left: list[Any] = []


def take_back(handles: Iterable[Any] = ()) -> None:
    """Remove hooks; while an error goes through the forward pass of a module, at the next call of this instead.

    In that case PyTorch (2.13, `Module._call_impl`) walks through the hooks themselves and not through a copy: a hook that were removed
    then would put another error in the place of the real one.

    Args:
        handles: What registering them gave. Until they are removed they must do nothing.
    """
    _left.extend(handles)
    if _is_error_in_module():
        return
    while _left:
        _left.pop().remove()


def _is_error_in_module() -> bool:
    """Whether an error that is being handled has reached a call of a module that is not over."""
    error = sys.exc_info()[1]
    if error is None:
        return False
    calls, code = set(), torch.nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            calls.add(frame)
        frame = frame.f_back
    while error is not None:
        if any(reached in calls for reached, _ in frames_of(error.__traceback__)):
            return True
        error = error.__context__
    return False
