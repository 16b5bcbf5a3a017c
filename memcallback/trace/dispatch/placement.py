"""Where tensors are: on the device or on the host, and which device Python code sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from memcallback.core.tensors import dense_parts
from memcallback.core.torch_private import DisableTorchFunction, FakeTensor, FakeTensorMode
from memcallback.cuda.op_call import OpCall, tensors_of
from memcallback.trace.dispatch.entries import Entry

_aten = torch.ops.aten
#: Operators that take a list of indices.
_INDEXED = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
    }
)
#: Products of matrices and vectors.
_PRODUCTS = frozenset(
    getattr(_aten, name).default
    for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution")
)
#: The caveat of a product of matrices on the host and on the device.
MIXED = (
    "{} takes a matrix on the host and one on the device, which is an error on a CUDA device. The "
    "matrix on the host was not counted. Move it to the device in the step. If your program has it "
    "on the device already when the step begins, name the module that has it: "
    "TrainingStep(..., also=[...])."
)


class Placement:
    """Where the tensors of one trace are.

    Attributes:
        target: Where the running torch function puts new storages, "device" or "host"; None where
            that follows from its tensors.
        arguments: The arguments of the running torch function; None outside of one.
        reports_cuda_device: Whether a fake tensor reports `cuda:0` as its device, as user code
            expects; PyTorch's own code must see the CPU.
    """

    def __init__(self, mode: FakeTensorMode, find: Callable[[torch.Tensor], Entry | None]) -> None:
        self._mode = mode
        self._find = find
        self.target: str | None = None
        self.arguments: tuple[object, ...] | None = None
        self.reports_cuda_device = False

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Put new tensors on the host."""
        before, self.target = self.target, "host"
        try:
            yield
        finally:
            self.target = before

    def is_on_device(self, tensor: object) -> bool:
        """Whether a tensor is on the device; a fake that the ledger does not know is."""
        if not isinstance(tensor, torch.Tensor):
            return False
        before, self.reports_cuda_device = self.reports_cuda_device, False
        try:
            with DisableTorchFunction():
                first = dense_parts(tensor)[0]
                if not isinstance(first, FakeTensor) or first.fake_mode is not self._mode:
                    return False
                entry = self._find(first)
        finally:
            self.reports_cuda_device = before
        return entry is None or not entry.is_host

    def is_on_meta(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the meta device."""
        with DisableTorchFunction():
            entry = self._find(dense_parts(tensor)[0])
        return entry is not None and entry.is_meta

    def makes_meta(self, call: OpCall) -> bool:
        """Whether the new host storages of a call are on the meta device."""
        return self.target is None and any(map(self.is_on_meta, call.inputs))

    def makes_host(self, call: OpCall) -> bool:
        """Whether the new storages of a call are on the host."""
        if self.target is not None:
            return self.target == "host"
        if not call.inputs:
            # A tensor from nothing: from Python on the host unless its call says otherwise, from
            # inside autograd on the device.
            return self.arguments is not None and not self._has_argument_on_device()
        entries = [self._find(t) if isinstance(t, FakeTensor) else None for t in call.inputs]
        if any(entry is not None and not entry.is_host for entry in entries):
            return False
        return not self._has_argument_on_device()

    def is_mixed_product(self, call: OpCall) -> bool:
        """Whether a matrix on the device meets one on the host, which the device refuses."""
        if call.op not in _PRODUCTS:
            return False
        entries = [self._find(tensor) for tensor in call.inputs if tensor.ndim]
        return len({entry.is_host for entry in entries if entry is not None}) == 2

    def host_indices(self, call: OpCall) -> list[torch.Tensor]:
        """Indices on the host into a tensor on the device, which the operator copies there.

        Of masks not the mask is copied, but the positions in it.
        """
        if call.op not in _INDEXED:
            return []
        entries = ((index, self._find(index)) for index in call.arguments[1] if index is not None)
        return [
            index
            for index, entry in entries
            if entry is not None and entry.is_host and index.dtype in (torch.int32, torch.int64)
        ]

    def _has_argument_on_device(self) -> bool:
        return self.arguments is not None and any(
            map(self.is_on_device, tensors_of(self.arguments))
        )
