"""Triton kernels: none is launched, and what their tuner allocates is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from memcallback.trace.patches.patching import Patch

#: A tuner clears the processor's cache with a tensor of so many bytes
#: (`get_empty_cache_for_benchmark` in triton/backends/nvidia/driver.py, 3.6).
_CACHE_BYTES = 256 << 20


def triton_patches() -> Iterator[Patch]:
    """Launch no kernel: it writes into tensors that are there, and allocates none itself."""
    if (jit := sys.modules.get("triton.runtime.jit")) is not None:
        yield jit.JITFunction, "run", lambda kernel, *args, **kwargs: None
    if (autotuner := sys.modules.get("triton.runtime.autotuner")) is not None:
        yield autotuner.Autotuner, "run", _tuning()
    if (library := sys.modules.get("torch._library.triton")) is not None:
        # Else `wrap_triton` hands the kernel to a compiler that is not there.
        yield library, "is_wrap_triton_enabled", lambda: False


def _tuning() -> Any:
    """What runs instead of a tuner: as it is called first for a kind of arguments, it measures."""
    known: set[tuple[object, ...]] = set()

    def run(tuner: Any, *args: Any, **kwargs: Any) -> None:
        if len(tuner.configs) < 2:
            return
        given = dict(zip(tuner.arg_names, args, strict=False)) | kwargs
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        key = (
            id(tuner),
            *(given[name] for name in tuner.keys if name in given),
            *(tensor.dtype for tensor in tensors),
        )
        if key in known or not tensors:
            return
        known.add(key)
        # While it measures, it keeps both.
        _ = (
            torch.empty(_CACHE_BYTES // 4, dtype=torch.int32, device=tensors[0].device),
            [given[name].clone() for name in tuner.restore_value],
        )

    return run
