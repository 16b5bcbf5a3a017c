"""When backward passes begin and end, whoever makes them.

A hook on the node of autograd that made the loss comes after that node's own backward pass, and would count its gradient to the forward
pass. So while anybody asks, a function stands in the place of `torch.autograd.backward`, which `Tensor.backward`, Fabric and accelerate
call; it says that it is called, and passes everything on. `torch.autograd.grad` is left alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


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
    """Tell somebody of every backward pass from here on.

    Args:
        listener: Is told; it is held weakly.

    Returns:
        What ends it, to be called once, also after the listener is gone.
    """
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
    """Put the original back, unless somebody else has taken the place since: theirs calls ours, which then only passes on."""
    global _stand_in, _original
    if torch.autograd.backward is _stand_in and _original is not None:
        torch.autograd.backward = _original
    _stand_in = _original = None
