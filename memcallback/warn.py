"""Warnings of what only memcallback suffers from."""

from __future__ import annotations

import warnings


class MemoryWarning(UserWarning):
    """Something keeps memcallback from recording, predicting or logging; training is not affected."""


def warn(text: str) -> None:
    """Warn of something that only memcallback suffers from."""
    warnings.warn(text, MemoryWarning, stacklevel=3)
