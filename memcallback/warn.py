"""The warnings of memcallback: of what it cannot do, and of what is wrong with the memory of a training."""

from __future__ import annotations

import warnings
from contextlib import suppress


class MemoryWarning(UserWarning):
    """Something keeps memcallback from recording, predicting or logging, or is wrong with the memory of a training, which goes on."""


def warn(text: str) -> None:
    """Warn with a `MemoryWarning`."""
    warnings.warn(text, MemoryWarning, stacklevel=3)


def warn_and_go_on(text: str) -> None:
    """The same in the middle of a training or of an error that goes on; where warnings are errors, nothing is said."""
    with suppress(MemoryWarning):
        warnings.warn(text, MemoryWarning, stacklevel=3)
