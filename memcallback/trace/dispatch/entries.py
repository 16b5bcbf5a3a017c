"""Entry: one allocation of a trace, while it is written."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from memcallback.core.allocation_trace import Fallback
from memcallback.core.kernel import AllocationSource
from memcallback.core.types import Category, Phase


class Entry:
    """One allocation of a trace.

    Attributes:
        id: Its number; None for host memory, which is not in the trace.
        size_bytes: The requested size.
        category: What it is for; None until that is known.
        operator: The operator that allocated it.
        module: The module that was running.
        phase: The phase in which it was allocated.
        node: The number of the autograd node that was running; -1 for none.
        is_freed: Whether it was freed.
        is_truth: Whether it reads as True.
        is_meta: Whether it is on the meta device.
        origin: The tensor and the line that it was allocated for; None without a tensor.
        stream: The CUDA stream that was current; 0 is the default one.
        fallback: What is tried if it does not fit; None if the program then fails.
    """

    __slots__ = (
        "category",
        "fallback",
        "id",
        "is_freed",
        "is_meta",
        "is_truth",
        "module",
        "node",
        "operator",
        "origin",
        "phase",
        "reference",
        "size_bytes",
        "stream",
    )

    def __init__(
        self,
        id_: int | None,
        size_bytes: int,
        category: Category | None,
        operator: str,
        module: str,
        phase: Phase | None,
        stream: int,
    ) -> None:
        self.id = id_
        self.size_bytes = size_bytes
        self.category = category
        self.operator = operator
        self.module = module
        self.phase = phase
        self.stream = stream
        self.node = -1
        self.is_freed = False
        self.is_truth = self.is_meta = False
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
        self.origin: AllocationSource | None = None
        self.fallback: Fallback | None = None

    @property
    def is_host(self) -> bool:
        """Whether it is host memory."""
        return self.id is None

    def copied(self, id_: int) -> Entry:
        """The same allocation with another number, in another batch."""
        entry = Entry(
            id_,
            self.size_bytes,
            self.category,
            self.operator,
            self.module,
            self.phase,
            self.stream,
        )
        entry.origin, entry.is_freed = self.origin, True
        entry.fallback = self.fallback
        return entry

    def described(self, renumber: Callable[[int], int]) -> tuple[object, ...]:
        """All that a trace has of it, under another number."""
        return (
            None if self.id is None else renumber(self.id),
            self.size_bytes,
            self.category,
            self.operator,
            self.module,
            self.phase,
            self.stream,
            self.origin,
            self.fallback,
        )
