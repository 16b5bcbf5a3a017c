"""Other kernels for operators of PyTorch, inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def aten_kernels(kernels: Iterable[tuple[str, str, Callable[..., Any]]]) -> Iterator[None]:
    """Register kernels for operators, each with its name and its dispatch key, in all threads.

    PyTorch's Python dispatcher, in which models are compiled, remembers where a call of an operator
    goes, and does not forget it with the registration. Such a call would then go to the key's
    fallback, which has no derivative. So it is told to look again at both ends.
    """
    library = torch.library.Library("aten", "IMPL")
    names: list[str] = []
    try:
        for name, key, kernel in kernels:
            library.impl(name, kernel, key)
            names.append(name)
        _forget_calls(names)
        yield
    finally:
        library._destroy()
        _forget_calls(names)


def _forget_calls(names: Iterable[str]) -> None:
    for name in names:
        packet, _, overload = name.partition(".")
        getattr(getattr(torch.ops.aten, packet), overload or "default")._dispatch_cache.clear()
