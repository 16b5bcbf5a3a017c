"""Registers other kernels for operators of PyTorch, and leaves none behind.

Predictions do so for CUDA's decompositions, for compilers and for autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def aten_kernels(kernels: Iterable[tuple[str, str, Callable[..., Any]]]) -> Iterator[None]:
    """Register kernels for operators, each with its name and its dispatch key, in all threads.

    While PyTorch compiles a model, its Python dispatcher caches which kernel an operator calls, and
    keeps that after the kernel is gone. The operator would then call the fallback of the dispatch
    key, which computes no gradient. So both ends of the block clear the caches of these operators.
    """
    library = torch.library.Library("aten", "IMPL")
    names: list[str] = []
    try:
        for name, key, kernel in kernels:
            library.impl(name, kernel, key)
            names.append(name)
        _clear_caches(names)
        yield
    finally:
        library._destroy()
        _clear_caches(names)


def _clear_caches(names: Iterable[str]) -> None:
    for name in names:
        packet, _, overload = name.partition(".")
        getattr(getattr(torch.ops.aten, packet), overload or "default")._dispatch_cache.clear()
