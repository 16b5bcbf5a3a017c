"""Hooks that are safe to remove mid-forward, and a listener for torch.autograd.backward.

A hook on the autograd node of the loss runs after that node's own backward pass, and would count
its gradient to the forward pass. So while there is a listener, a wrapper replaces
`torch.autograd.backward`, which `Tensor.backward`, Fabric and accelerate call. It notifies the
listeners and passes everything on. `torch.autograd.grad` is left alone.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import FrameType
from typing import Any, Protocol

import torch

from memcallback.core.code_lines import frames_of
from memcallback.core.torch_private import module_call


class BackwardListener(Protocol):
    """Gets notified of backward passes."""

    def backward_begins(self) -> bool | None:
        """A backward pass begins; returns whether to notify of its end."""

    def backward_ends(self, *, is_interrupted: bool) -> None:
        """It has ended, perhaps by an exception."""


_listeners: weakref.WeakSet[BackwardListener] = weakref.WeakSet()
_num_listeners = 0
_wrapper: Callable[..., None] | None = None
_original: Callable[..., None] | None = None


def listen(listener: BackwardListener) -> Callable[[], None]:
    """Notify a listener of every backward pass until the returned function is called."""
    global _num_listeners
    _listeners.add(listener)
    _num_listeners += 1
    if _wrapper is None:
        _wrap_backward()
    reference = weakref.ref(listener)

    def end() -> None:
        global _num_listeners
        if (listener := reference()) is not None:
            _listeners.discard(listener)
        _num_listeners -= 1
        if not _num_listeners:
            _unwrap_backward()

    return end


def _wrap_backward() -> None:
    global _wrapper, _original
    original = _original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        notified = [listener for listener in tuple(_listeners) if listener.backward_begins()]
        try:
            original(*args, **kwargs)
        except BaseException:  # whatever ends the pass, which goes on
            for listener in notified:
                listener.backward_ends(is_interrupted=True)
            raise
        for listener in notified:
            listener.backward_ends(is_interrupted=False)

    # What `torch.compiler.disable` sets; calling that would import the compiler.
    backward._torchdynamo_disable = True  # type: ignore[attr-defined]
    _wrapper = torch.autograd.backward = backward


def _unwrap_backward() -> None:
    """Restore the original, unless another wrapper was put around ours, which then passes on."""
    global _wrapper, _original
    if torch.autograd.backward is _wrapper and _original is not None:
        torch.autograd.backward = _original
    _wrapper = _original = None


class Hook:
    """Calls a function, and returns None to PyTorch.

    It does nothing in a copy of its owner, which may be pickled and read where this package is not
    installed, and in a compiled module.

    Attributes:
        comes_and_goes: Whether it is taken away while Dynamo compiles.
    """

    comes_and_goes = False

    def __init__(self, function: Callable[..., object] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function with the arguments of the hook."""
        if not torch.compiler.is_compiling() and self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable of Python's own that does nothing: files of pickled modules do not name ours.
        return getattr, (nullcontext(), "__exit__")


#: Handles of hooks that could not be removed yet.
_pending: list[Any] = []


def remove_hooks(handles: Iterable[Any] = ()) -> None:
    """Remove hooks, which must do nothing from now on; later if an error leaves a module now.

    PyTorch (2.13, `Module._call_impl`) then iterates over the hooks themselves and not over a copy:
    removing one would replace the real error by another. The next call removes it.
    """
    _pending.extend(handles)
    if is_error_in_module():
        return
    while _pending:
        _pending.pop().remove()


def is_error_in_module() -> bool:
    """Whether an error that is being handled has reached a module's call that is still running."""
    error = sys.exc_info()[1]
    if error is None:
        return False
    calls, code = set(), module_call.__code__
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
