"""Write the allocations of a CUDA operator into the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from memcallback.core.kernel import (
    AllocTemp,
    FreeTemp,
    Kernel,
    KernelRule,
    OpenBlasHandles,
    completed,
)
from memcallback.core.torch_private import no_dispatch
from memcallback.core.types import Category
from memcallback.cuda.kernels.matrix import (
    uses_cublas,
    uses_cublaslt,
    uses_cublaslt_alone,
)
from memcallback.cuda.op_call import OpCall
from memcallback.cuda.rules import kernel_rule
from memcallback.trace.dispatch.entries import Entry
from memcallback.trace.dispatch.ledger import Ledger


class KernelWriter:
    """Writes the operators of one trace, and knows which library handles are open.

    The first matrix product of a thread in a stream opens handles, whose workspaces stay; the
    backward pass runs in a thread of its own. There is a workspace for each handle and stream
    (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    def __init__(self) -> None:
        self._workspaces: dict[tuple[str, bool, int], Entry] = {}
        #: What each rule gives for so many outputs, as it is and completed.
        self._kernels: dict[tuple[KernelRule, int], tuple[Kernel, Kernel]] = {}

    def write(
        self, ledger: Ledger, call: OpCall, name: str, node: int, *, is_backward: bool
    ) -> None:
        """Write the temporaries of a call, and those outputs that the ledger does not know."""
        rule = kernel_rule(call)
        tensors = call.outputs
        steps, whole = self._kernels_of(rule, len(tensors))
        temps, outputs = list[Entry](), list[Entry | None]([None] * len(tensors))
        handles = list[Entry]()
        ledger.begin_call()
        for step in whole:
            if isinstance(step, OpenBlasHandles):
                if step in steps or uses_cublas(call):
                    handles = list(self._opened(ledger, call, name, is_backward=is_backward))
            elif isinstance(step, AllocTemp):
                temps.append(ledger.alloc_temp(step.size_bytes, step.category, name, step.fallback))
            elif isinstance(step, FreeTemp):
                ledger.free(temps[step.index])
            elif ledger.find(tensors[step.index]) is None:
                entry = outputs[step.index] = ledger.add(tensors[step.index], None, name)
                entry.node = node
        if rule is not None:
            ledger.end_call(rule, outputs, handles, name)

    def _kernels_of(self, rule: KernelRule | None, num_outputs: int) -> tuple[Kernel, Kernel]:
        """What a rule gives for any batch size, made once for all equal calls of a trace."""
        if rule is None:
            return (), _plain_kernel(num_outputs)
        kernels = self._kernels.get((rule, num_outputs))
        if kernels is None:
            with no_dispatch():
                kernel = rule.function(*rule.constants, *rule.numbers)
            kernels = kernel, completed(kernel, num_outputs)
            self._kernels[rule, num_outputs] = kernels
        return kernels

    def close_handles(self, ledger: Ledger) -> None:
        """Free all workspaces (`torch._C._cuda_clearCublasWorkspaces`)."""
        for entry in self._workspaces.values():
            ledger.free(entry)
        self._workspaces.clear()

    def _opened(
        self, ledger: Ledger, call: OpCall, name: str, *, is_backward: bool
    ) -> Iterator[Entry]:
        """Open the handles that a matrix product needs, and give the new workspaces."""
        needed = {}
        if not uses_cublaslt_alone(call):
            needed["cuBLAS"] = call.device.cublas_workspace_bytes
        if uses_cublaslt(call) and call.device.cublaslt_workspace == "each handle":
            needed["cuBLASLt"] = call.device.cublaslt_workspace_bytes
        for library, workspace_bytes in needed.items():
            handle = (library, is_backward, ledger.stream)
            if handle not in self._workspaces:
                entry = ledger.alloc(workspace_bytes, Category.WORKSPACE, name)
                self._workspaces[handle] = entry
                yield entry


@cache
def _plain_kernel(num_outputs: int) -> Kernel:
    """The kernel of an operator without a rule."""
    return completed((), num_outputs)
