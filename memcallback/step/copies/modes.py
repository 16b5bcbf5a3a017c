"""Global state that a run on fakes leaves alone: the user's own modes, and random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memcallback.core.torch_private import (
    DeviceContext,
    disable_dispatch_modes,
    num_dispatch_modes,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
)


@contextmanager
def untouched_globals() -> Iterator[None]:
    """Restore random generators, set modes aside, keep `torch.compile` from compiling for fakes.

    Covers Python's `random`, NumPy's global generator if NumPy is imported, and PyTorch's CPU
    generator. Enter it outside of any fake mode: inside, the generator's state would be a fake.
    """
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    torch_state = torch.get_rng_state()
    try:
        with _eager(), without_modes():
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _eager() -> AbstractContextManager[object]:
    # Nothing is compiled before dynamo is imported, and importing it takes about a second.
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


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
