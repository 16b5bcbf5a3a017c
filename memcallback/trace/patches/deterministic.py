"""Functions that run other operators on a device while algorithms are to be deterministic.

`interpolate`, `pad` and `max_pool3d` (torch/nn/functional.py) run decompositions there, whose
backward pass is an `index_put`. They ask the tensor where it is, and inside torch functions fakes
say that they are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from memcallback.trace.dispatch.placement import Placement
from memcallback.trace.patches.patching import Patch, patched

_FUNCTIONS = (F.interpolate, F.pad, F.max_pool3d_with_indices)
_DECOMPOSITIONS = ("_upsample_linear_vec", "_replication_pad", "max_pool3d_with_indices")


def deterministic_functions(
    placement: Placement, user_code: Callable[[], AbstractContextManager[None]]
) -> dict[Any, Callable[..., Any]]:
    """The functions, and what runs instead of each."""

    def in_user_code(decomposition: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with user_code():
                return decomposition(*args)

        return run

    def patches() -> Iterator[Patch]:
        yield FakeTensor, "is_cpu", property(lambda tensor: not placement.is_on_device(tensor))
        yield FakeTensor, "is_cuda", property(placement.is_on_device)
        for name in _DECOMPOSITIONS:
            if (decomposition := getattr(decompositions, name, None)) is not None:
                yield decompositions, name, in_user_code(decomposition)

    def instead(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with patched(patches() if torch.are_deterministic_algorithms_enabled() else ()):
                return function(*args, **kwargs)

        return run

    return {function: instead(function) for function in _FUNCTIONS}
