"""KeptPlans: the algorithms that cuDNN's convolutions take where the first does not fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TypeVar

from memcallback.core.allocation_trace import Alloc
from memcallback.prediction.allocator.caching import OutOfMemoryError

_Block = TypeVar("_Block")


class KeptPlans:
    """What was allocated where something did not fit, which later calls allocate at once.

    As `run_single_conv` in ATen/native/cudnn/Conv_v8.cpp: a plan whose workspace does not fit gives
    way to the next, and the one that runs is kept for each problem and thread. The backward pass
    has a thread of its own.
    """

    def __init__(self) -> None:
        self._sizes: dict[Hashable, int] = {}

    def allocate(
        self, alloc: Alloc, allocate: Callable[[int], _Block], *, is_backward: bool
    ) -> _Block | None:
        """Allocate it or what fits instead, None if that needs no memory; else the first error."""
        key = alloc.fallback, is_backward
        kept_bytes = self._sizes.get(key)
        first_bytes = alloc.size_bytes if kept_bytes is None else kept_bytes
        try:
            return allocate(first_bytes) if first_bytes else None
        except OutOfMemoryError:
            sizes_bytes = alloc.fallback.sizes_bytes() if alloc.fallback else ()
            # Skip the first plan if it is the one that has just failed. Where a kept plan failed,
            # try all.
            has_failed = key not in self._sizes and sizes_bytes[:1] == (first_bytes,)
            for size_bytes in sizes_bytes[1 if has_failed else 0 :]:
                with suppress(OutOfMemoryError):
                    block = allocate(size_bytes) if size_bytes else None
                    self._sizes[key] = size_bytes
                    return block
            raise
