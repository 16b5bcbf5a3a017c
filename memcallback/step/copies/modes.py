"""without_modes(): sets aside the user's own dispatch and function modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from memcallback.core.torch_private import (
    DeviceContext,
    disable_dispatch_modes,
    num_dispatch_modes,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
)


@contextmanager
def without_modes() -> Iterator[None]:
    """Leave all modes but the default device, so that none counts or changes what we run."""
    # Disabling none imports much.
    with disable_dispatch_modes() if num_dispatch_modes() else nullcontext(), _no_function_modes():
        yield


@contextmanager
def _no_function_modes() -> Iterator[None]:
    modes: list[Any] = [pop_function_mode() for _ in range(num_function_modes())][::-1]
    devices = [mode for mode in modes if isinstance(mode, DeviceContext)]
    for mode in devices:
        push_function_mode(mode)
    try:
        yield
    finally:
        for _ in devices:
            pop_function_mode()
        for mode in modes:
            push_function_mode(mode)
