"""unshared(): a fork without large memory that the child does not read."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

#: Of Linux (madvise(2)), from 4.14 on: a forked child finds zeros there; and as usual again.
_WIPE_ON_FORK, _KEEP_ON_FORK = 18, 19
#: Smaller pieces are written in no time.
_MIN_BYTES = 1 << 16


@contextmanager
def unshared(storages: Mapping[int, int]) -> Iterator[None]:
    """In this context a fork shares none of the storages (address -> bytes) with its child.

    Linux copies a shared page when it is written, which makes a training step several times as
    long. The child finds zeros in their whole pages. Small storages and memory of another kind,
    such as a mapped file, stay shared.
    """
    large = [_whole_pages(*one) for one in storages.items() if one[1] >= _MIN_BYTES]
    try:
        for pages in large:
            _advise(pages, _WIPE_ON_FORK)
        yield
    finally:
        # In reverse order no piece has to be split that the kernel has joined, which can fail. All
        # of them, since it may have taken the advice for a part.
        for pages in reversed(large):
            _advise(pages, _KEEP_ON_FORK)


def _whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """The pages that lie inside as a whole, by address and bytes."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start


def _advise(pages: tuple[int, int], advice: int) -> None:
    start, num_bytes = pages
    _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice)


@cache
def _madvise() -> Any:
    # PyDLL keeps the GIL, so that other threads have less time to fork meanwhile.
    return ctypes.PyDLL(None).madvise
