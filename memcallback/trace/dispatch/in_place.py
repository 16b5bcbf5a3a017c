"""Gradient accumulation in place, which autograd does on CUDA, but not under a dispatch mode."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any

import torch

import memcallback
from memcallback.core.allocation_trace import GRAPH_POOL
from memcallback.core.tensors import dense_parts
from memcallback.core.torch_private import FakeTensor, base_of, sequence_nr, storage_id, use_count
from memcallback.cuda.op_call import is_dense_in_any_order
from memcallback.trace.dispatch.entries import Entry

_aten = torch.ops.aten
_PACKAGE = os.path.dirname(memcallback.__file__) + os.sep
#: Operators that accumulate a gradient into new zeros -> the in-place operator on CUDA.
IN_PLACE = {
    _aten.index_put.default: _aten._index_put_impl_.default,
    _aten.put.default: _aten.put_.default,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}
#: Nodes that use these operators out of place: `scatter_reduce_backward` and
#: `index_reduce_backward` in torch/csrc/autograd/FunctionsManual.cpp, and the gradient of what was
#: written to a view.
_OUT_OF_PLACE = ("ScatterReduceBackward", "IndexReduceBackward", "torch::autograd::CopySlices")
#: Nodes that find which elements are the largest: `evenly_distribute_backward`.
_EVENLY = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
#: Nodes whose formulas add no tensors (tools/autograd/derivatives.yaml): an addition while one
#: runs adds its gradients of one tensor, as of `y * y`.
_WITHOUT_ADDITION = frozenset(
    f"{name}Backward{number}"
    for name, number in (
        ("Add", 0),
        ("Addmm", 0),
        ("Baddbmm", 0),
        ("Bmm", 0),
        ("Div", 0),
        ("Dot", 0),
        ("Hypot", 0),
        ("Maximum", 0),
        ("Minimum", 0),
        ("Mm", 0),
        ("Mul", 0),
        ("Mv", 0),
        ("Pow", 1),
        ("ScaledDotProductCudnnAttention", 0),
        ("ScaledDotProductEfficientAttention", 0),
        ("ScaledDotProductFlashAttention", 0),
        ("Sub", 0),
        ("Where", 0),
        ("Xlogy", 0),
    )
)
#: Operators of a loss gradient that are in place: `sigmoid(x).sub_(target).mul_(gradient)`.
_LOSS_IN_PLACE = frozenset({_aten.sub.Tensor, _aten.mul.Tensor, _aten.div_.Scalar})


#: What decides how many references PyTorch and a trace hold -> is sparse -> the reference counts of
#: a tensor that nobody else holds. Kept, since counting takes a backward pass of its own.
_COUNTED: dict[Hashable, dict[bool, tuple[int, int]]] = {}


class InPlace:
    """Finds the argument that autograd would overwrite with an operator's result."""

    def __init__(self, find: Callable[[torch.Tensor], Entry | None]) -> None:
        self._find = find
        self._alone: dict[bool, tuple[int, int]] = {}
        self._is_calibrating = False

    def calibrate(self, key: Hashable) -> None:
        """Learn the reference counts of unshared tensors: once a key, as some are added here."""
        # While compiled code runs, Python's calls hold their arguments once more.
        key = (key, _references_in_a_call(object()))
        if key in _COUNTED:
            self._alone = _COUNTED[key]
            return
        self._is_calibrating = True
        x = torch.empty(2, 2, requires_grad=True, device="cpu")
        (x.sin() + x.cos()).sum().backward()
        rows = torch.empty(1, dtype=torch.int64, device="cpu")
        torch.embedding(torch.empty_like(x, requires_grad=True), rows, sparse=True).sum().backward()
        self._is_calibrating = False
        _COUNTED[key] = self._alone

    def reused(self, func: Any, args: Sequence[object], node: Any) -> torch.Tensor | None:
        """The argument that autograd overwrites with an operator's result; None for a new result.

        On CUDA, autograd writes in place where nobody can see it; under a dispatch mode it never
        does. It adds a gradient to one that nobody else holds (`InputBuffer` in
        torch/csrc/autograd/input_buffer.cpp), and accumulates gradients in its own zeros
        (`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp). A sparse gradient
        that nobody else holds becomes the parameter's without a copy (`accumulateGrad` in
        torch/csrc/autograd/functions/accumulate_grad.h).
        """
        first = args[0] if args else None
        if not isinstance(first, FakeTensor):
            return None
        if first.layout is torch.sparse_coo:
            is_gradient = (
                func is _aten.clone.default and node.name() == "torch::autograd::AccumulateGrad"
            )
            return (
                first
                if is_gradient
                and self._is_alone(first)
                and all(part.is_contiguous() for part in dense_parts(first))
                else None
            )
        entry = self._find(first)
        if entry is None:
            return None
        if func is _aten.add.Tensor and len(args) == 2:
            other = args[1]
            alike = (
                isinstance(other, FakeTensor)
                and other.shape == first.shape
                and other.dtype == first.dtype
            )
            return (
                first
                if alike
                # The tree of CUDA graphs holds what its graphs return.
                and entry.stream != GRAPH_POOL
                and (entry.node != sequence_nr(node) or _adds_gradients(node))
                and self._is_alone(first)
                and is_dense_in_any_order(first)
                else None
            )
        is_loss = func in _LOSS_IN_PLACE and node.name() == "BinaryCrossEntropyWithLogitsBackward0"
        is_mask = func is _aten.logical_and.default and node.name() in _EVENLY
        accumulates = func in IN_PLACE and not node.name().startswith(_OUT_OF_PLACE)
        return (
            first
            if (accumulates or is_loss or is_mask) and entry.node == sequence_nr(node)
            else None
        )

    def is_last_view(self, gradient: Any, op: Any) -> bool:
        """Whether nobody but the running node, which makes a view of it, holds a gradient.

        Nor the tensor that it is a view of, which only a fake keeps.
        """
        base = base_of(gradient)
        num_bases = int(base is not gradient)
        count, num_others = self._alone[False]
        return (
            # `reshape` holds it too.
            gradient._use_count() <= count + (op is _aten.view.default)
            and use_count(storage_id(gradient.untyped_storage())) <= num_others + num_bases
            and (not num_bases or base._use_count() < count)
        )

    def _is_alone(self, tensor: FakeTensor) -> bool:
        is_sparse = tensor.layout is torch.sparse_coo
        # C++ counts all of Python's references to a tensor as one.
        others = (
            sys.getrefcount(tensor)
            if is_sparse
            else use_count(storage_id(tensor.untyped_storage()))
        )
        counts = (tensor._use_count(), others)  # type: ignore[attr-defined]
        if self._is_calibrating:
            self._alone[is_sparse] = min(self._alone.get(is_sparse, counts), counts)
        alone = self._alone[is_sparse]
        return counts[0] <= alone[0] and counts[1] <= alone[1]


def _references_in_a_call(argument: object) -> int:
    """How many references there are to an argument that the caller holds no longer."""
    return sys.getrefcount(argument)


def _adds_gradients(node: Any) -> bool:
    """Whether autograd itself adds while a node runs, not the node's formula, nor a hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    is_of_engine = frame is None or frame.f_code.co_name == "_engine_run_backward"
    return is_of_engine and node.name() in _WITHOUT_ADDITION
