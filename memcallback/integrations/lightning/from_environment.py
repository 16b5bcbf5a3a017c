"""Adds `MemoryCallback` to every Trainer where the environment has `MEMCALLBACK=1`.

Lightning loads this module for each Trainer, in every program on a machine that has this package:
it imports nothing else unless it is asked to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

NAME = "MEMCALLBACK"
_ON, _OFF = ("1",), ("", "0")


def callbacks() -> list[Any]:
    """The callbacks to add to the Trainer that is being made: one or none."""
    value = os.environ.get(NAME, "")
    if value in _OFF:
        return []
    from memcallback.core.errors import faults_as_warnings, warn_and_go_on

    if value not in _ON:
        warn_and_go_on(
            f"{NAME}={value!r} is neither 1 nor 0, so no MemoryCallback is added. Set {NAME}=1, or "
            "unset it."
        )
        return []
    with faults_as_warnings("No MemoryCallback is added."):
        from memcallback.integrations.lightning.added_callback import AddedMemoryCallback
        from memcallback.integrations.lightning.callback import MemoryCallback

        if not any(isinstance(callback, MemoryCallback) for callback in _callbacks_here()):
            return [AddedMemoryCallback()]
    return []


def _callbacks_here() -> Iterable[Any]:
    """The callbacks that the Trainer has already; Lightning does not pass them."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("lightning.", "pytorch_lightning.")):
            # Past properties: a LightningModule's `trainer` raises where it has none.
            trainer: Any = getattr(frame.f_locals.get("self"), "__dict__", {}).get("trainer")
            if "callbacks" in getattr(trainer, "__dict__", {}):
                callbacks: list[Any] = trainer.callbacks
                return callbacks
        frame = frame.f_back
    return ()
