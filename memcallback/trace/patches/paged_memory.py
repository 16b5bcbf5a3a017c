"""Unified memory, which bitsandbytes' paged optimizers take from CUDA for their state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.patching import Patch

_NOT_COUNTED = (
    "Paged optimizer state is not counted. It is in unified memory, outside PyTorch's allocator: "
    "it moves to the device for an update, and back if the device is full."
)


def paged_memory_patches(mode: TraceMode) -> Iterator[Patch]:
    """Let paged state be tensors of the host: no library that takes unified memory is called."""
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if not hasattr(functional, "get_paged"):
        return
    fill: Any = getattr(functional, "fill", None)

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
        mode.assumed[_NOT_COUNTED] = None
        paged: Any = torch.zeros(shape, dtype=dtype, device="cpu")
        paged.is_paged = True
        return paged

    def fill_unless_paged(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return None if getattr(tensor, "is_paged", False) else fill(tensor, *args, **kwargs)

    yield functional, "get_paged", get_paged
    yield functional, "fill", fill_unless_paged
    yield functional, "prefetch_tensor", lambda *args, **kwargs: None
