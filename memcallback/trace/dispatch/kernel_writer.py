"""KernelWriter: writes the allocations of CUDA operators into the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

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
from memcallback.cuda.op_call import OpCall, dense_bytes
from memcallback.cuda.rules import has_known_kernel, kernel_rule
from memcallback.trace.dispatch.collectives import temporary_bytes
from memcallback.trace.dispatch.entries import Entry
from memcallback.trace.dispatch.in_place import IN_PLACE
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.placement import Placement

_aten = torch.ops.aten
_UNKNOWN = (
    "{} is no operator of PyTorch: what its kernel allocates beside its results is not counted, so "
    "the step may need more."
)


class KernelWriter:
    """Writes the operators of one trace, and knows which library handles are open.

    The first matrix product of a thread in a stream opens handles, whose workspaces stay; the
    backward pass runs in a thread of its own. There is a workspace for each handle and stream
    (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    def __init__(self, placement: Placement, assumed: dict[str, None]) -> None:
        self._placement, self._assumed = placement, assumed
        self._is_in_backward = False
        self._workspaces: dict[tuple[str, bool, int], Entry] = {}
        #: What each rule gives for so many outputs, as it is and completed.
        self._kernels: dict[tuple[KernelRule, int], tuple[Kernel, Kernel]] = {}

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Run a backward pass inside, for which CUDA has a thread of its own."""
        before, self._is_in_backward = self._is_in_backward, True
        try:
            yield
        finally:
            self._is_in_backward = before

    def record(self, ledger: Ledger, call: OpCall, node: int) -> None:
        """Record what an operator allocates, on the device or on the host."""
        name = call.operator
        unknown = [tensor for tensor in call.outputs if ledger.find(tensor) is None]
        if unknown and self._placement.makes_host(call):
            is_meta = self._placement.makes_meta(call)
            for tensor in unknown:
                ledger.add(tensor, None, name, is_host=True).is_meta = is_meta
        else:
            if not has_known_kernel(call.op):
                self._assumed[_UNKNOWN.format(name)] = None
            if moment_bytes := temporary_bytes(name, call.args):
                ledger.free(ledger.alloc_temp(moment_bytes, Category.TEMPORARY, name))
            copies = [
                ledger.alloc_temp(dense_bytes(index), Category.TEMPORARY, name)
                for index in self._placement.host_indices(call)
            ]
            self._write(ledger, call, name, node)
            for copy in copies:
                ledger.free(copy)
        if call.op is _aten.resize_.default:
            storage = call.outputs[0].untyped_storage()
            entry = ledger.find(call.outputs[0])
            is_changed = entry is not None and entry.size_bytes != storage.nbytes()
            if entry is not None and not entry.is_host and is_changed:
                ledger.resize(storage)

    def record_in_place(
        self, ledger: Ledger, call: OpCall, reused: torch.Tensor, node: int
    ) -> None:
        """Record an operator that CUDA runs in place, in the allocation of `reused`."""
        called, args = IN_PLACE.get(call.op, call.op), call.args
        if called is _aten._index_put_impl_.default:
            args = (*args, True)  # indices that were right in the forward pass are not checked
        in_place = OpCall(called, args, call.kwargs, call.card, [reused])
        self._write(ledger, in_place, call.operator, node)

    def _write(self, ledger: Ledger, call: OpCall, name: str, node: int) -> None:
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
                    handles = list(self._opened(ledger, call, name))
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
        """Free all workspaces (`torch._C._cuda_clearCublasWorkspaces`); products open new ones."""
        for entry in self._workspaces.values():
            ledger.free(entry)
        self._workspaces.clear()

    def _opened(self, ledger: Ledger, call: OpCall, name: str) -> Iterator[Entry]:
        """Open the handles that a matrix product needs, and give the new workspaces."""
        needed = {}
        if not uses_cublaslt_alone(call):
            needed["cuBLAS"] = call.device.cublas_workspace_bytes
        if uses_cublaslt(call) and call.device.cublaslt_workspace == "each handle":
            needed["cuBLASLt"] = call.device.cublaslt_workspace_bytes
        for library, workspace_bytes in needed.items():
            handle = (library, self._is_in_backward, ledger.stream)
            if handle not in self._workspaces:
                entry = ledger.alloc(workspace_bytes, Category.WORKSPACE, name)
                self._workspaces[handle] = entry
                yield entry


@cache
def _plain_kernel(num_outputs: int) -> Kernel:
    """The kernel of an operator without a rule."""
    return completed((), num_outputs)
