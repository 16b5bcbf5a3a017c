"""What compiled code with activation checkpointing needs of a card's random generators.

Inductor writes random numbers of its own kernels anew from a seed. A library kernel that draws
(attention with dropout) runs a second time in the backward pass, from the state that the forward
pass had: torch/_prims/rng_prims.py. The states are on the host, so they take no memory of the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims import rng_prims

from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.patches.patching import Patch


class _Generator(torch.Generator):
    """Stands for a generator of the card, which a machine without one does not have."""

    device = CUDA

    def clone_state(self) -> _Generator:
        return _Generator()

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: torch.Generator) -> _Generator:
        return self


def random_state_patches() -> Iterator[Patch]:
    """Give the card a generator, and let operators run with the state of another time."""
    yield torch.cuda, "default_generators", (_Generator(),)
    if hasattr(torch._C, "_accelerator_getDefaultGenerator"):  # which Inductor of 2.14 asks
        yield torch._C, "_accelerator_getDefaultGenerator", lambda index: _Generator()
    for name in ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"):
        operator = getattr(rng_prims, name)
        yield operator, "python_key_table", {**operator.python_key_table, TraceMode: _RUN[name]}


def _run(mode: TraceMode, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("rng_state", None)
    with mode:
        return operator(*args, **kwargs)


def _run_and_save(mode: TraceMode, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch.cuda.get_rng_state(), _run(mode, operator, *args, **kwargs)


def _run_with(
    mode: TraceMode, state: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return _run(mode, operator, *args, **kwargs)


_RUN = {
    "run_and_save_rng_state": _run_and_save,
    "run_with_rng_state": _run_with,
    "graphsafe_run_with_rng_state": _run,
}
