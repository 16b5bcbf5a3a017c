"""Callback: the base class of `MemoryCallback`, from the package of Lightning that is in use."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback
else:
    # The two packages are the same code with unrelated classes, and a Trainer may refuse a callback
    # of the other package. A program uses one of them: the one it has imported. If it has imported
    # neither yet, the class derives from both, as far as they are installed.
    _names = ("lightning.pytorch", "pytorch_lightning")
    _bases = [sys.modules[name].Callback for name in _names if name in sys.modules]
    for _name in () if _bases else _names:
        with suppress(Exception):  # one of the two may be missing or broken
            _bases.append(import_module(_name).Callback)
    if not _bases:
        raise ModuleNotFoundError(
            "MemoryCallback needs Lightning: pip install lightning. MemoryRecorder works without "
            "it."
        )
    Callback = type("Callback", tuple(_bases), {})
