"""Hooks that are safe to remove mid-forward; a listener for torch.autograd.backward.

A hook on the node of autograd that made the loss comes after that node's own backward pass, and
would count its gradient to the forward pass. So while anybody asks, a function stands in the place
of `torch.autograd.backward`, which `Tensor.backward`, Fabric and accelerate call; it says that it
is called, and passes everything on. `torch.autograd.grad` is left alone.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import torch

from memcallback.core.code_lines import frames_of


class BackwardListener(Protocol):
    """What is told of backward passes."""

    def backward_begins(self) -> bool | None:
        """A backward pass begins; whether it is to be told when this one ends."""

    def backward_ends(self, *, is_interrupted: bool) -> None:
        """It is over, or an exception has ended it."""


_listeners: weakref.WeakSet[BackwardListener] = weakref.WeakSet()
_num_listeners = 0
_stand_in: Callable[..., None] | None = None
_original: Callable[..., None] | None = None


def listen(listener: BackwardListener) -> Callable[[], None]:
    """Tell somebody of every backward pass from here on."""
    global _num_listeners
    _listeners.add(listener)
    _num_listeners += 1
    if _stand_in is None:
        _take_place()
    heard = weakref.ref(listener)

    def end() -> None:
        global _num_listeners
        if (found := heard()) is not None:
            _listeners.discard(found)
        _num_listeners -= 1
        if not _num_listeners:
            _give_back()

    return end


def _take_place() -> None:
    global _stand_in, _original
    original = _original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        told = [listener for listener in tuple(_listeners) if listener.backward_begins()]
        try:
            original(*args, **kwargs)
        except BaseException:
            for listener in told:
                listener.backward_ends(is_interrupted=True)
            raise
        for listener in told:
            listener.backward_ends(is_interrupted=False)

    # What `torch.compiler.disable` sets; calling that would import the compiler.
    backward._torchdynamo_disable = True  # type: ignore[attr-defined]
    _stand_in = torch.autograd.backward = backward


def _give_back() -> None:
    """Put the original back, unless somebody else has taken the place since: theirs calls ours,
    which then only passes on.
    """
    global _stand_in, _original
    if torch.autograd.backward is _stand_in and _original is not None:
        torch.autograd.backward = _original
    _stand_in = _original = None


class Hook:
    """Calls a function and gives PyTorch nothing back.

    In a copy of what it is on, which may be pickled, it does nothing; nor does it where a module is
    compiled with its hooks.
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
    """Remove hooks; while an error goes through the forward pass of a module, at the next call of
    this instead.

    In that case PyTorch (2.13, `Module._call_impl`) walks through the hooks themselves and not
    through a copy: a hook that were removed then would put another error in the place of the real
    one.
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
