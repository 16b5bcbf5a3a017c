"""Write a CUDA operator's allocations into the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memcallback.core.kernel import AllocTemp, FreeTemp, Kernel, OpenBlasHandles, completed
from memcallback.core.types import Category
from memcallback.cuda.convolution.rule import convolution_kernel
from memcallback.cuda.kernels.matrix import uses_cublas, uses_cublaslt
from memcallback.cuda.rules import CONVOLUTIONS, CUBLASLT_WORKSPACE_BYTES, kernel, kernel_rule
from memcallback.devices.catalogue import DeviceSpec
from memcallback.trace.dispatch.ledger import Entry, Ledger


class KernelEntries:
    """Writes down operators one after the other, and knows which handles of libraries are open.

    The first matrix product of a thread in a stream opens handles, whose workspaces stay; the
    backward pass runs in a thread of its own. There is a workspace for each handle and stream
    (aten/src/ATen/cuda/CublasHandlePool.cpp).

    Attributes:
        spec: The card.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self._handles: set[tuple[str, bool, int]] = set()

    def write(
        self,
        ledger: Ledger,
        func: Any,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        places: Sequence[torch.Tensor | None],
        new: dict[int, int],
        name: str,
        node: int,
        is_in_backward: bool,
    ) -> None:
        """Write down what an operator does."""
        rule = kernel_rule(func, args, kwargs, places, self.spec)
        taken_by: Callable[..., Kernel | None] = (
            convolution_kernel if func in CONVOLUTIONS else kernel
        )
        steps = (taken_by(func, args, kwargs, places, self.spec) if rule else None) or ()
        multiplies = OpenBlasHandles() in steps or uses_cublas(func, args)
        taken, made = list[Entry](), list[Entry | None]([None] * len(places))
        ledger.begin_call()
        for step in completed(steps, len(places)):
            if isinstance(step, OpenBlasHandles):
                needed = self._workspaces(func, args, kwargs) if multiplies else {}
                handles = [
                    ledger.take(size_bytes, Category.WORKSPACE, name)
                    for size_bytes in self._opened(needed, is_in_backward, ledger.stream)
                ]
            elif isinstance(step, AllocTemp):
                taken.append(ledger.take_temporary(step.size_bytes, step.category, name))
            elif isinstance(step, FreeTemp):
                ledger.give(taken[step.index])
            else:
                tensor = places[step.index]
                size_bytes = (
                    None if tensor is None else new.pop(tensor.untyped_storage()._cdata, None)
                )
                if tensor is not None and size_bytes is not None:
                    entry = made[step.index] = ledger.add(tensor, None, name, size_bytes=size_bytes)
                    entry.node = node
        if rule is not None:
            ledger.end_call(rule, made, handles, name)

    def _workspaces(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> dict[str, int]:
        """The bytes of the workspace of each library that a matrix product goes through."""
        needed = {"cuBLAS": self.spec.cublas_workspace_bytes}
        if uses_cublaslt(func, args, kwargs):
            needed["cuBLASLt"] = CUBLASLT_WORKSPACE_BYTES
        return needed

    def _opened(
        self, needed: Mapping[str, int], is_in_backward: bool, stream: int
    ) -> Iterator[int]:
        """Open handles that are not open yet, and give the bytes of their workspaces."""
        for library, workspace_bytes in needed.items():
            handle = (library, is_in_backward, stream)
            if handle not in self._handles:
                self._handles.add(handle)
                yield workspace_bytes
