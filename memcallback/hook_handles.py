"""Hooks on modules are taken back where PyTorch is not walking through them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

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
    if sys.exc_info()[1] is not None and _is_in_module():
        return
    while _left:
        _left.pop().remove()


def _is_in_module() -> bool:
    code, frame = torch.nn.Module._call_impl.__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
