"""Placeholders where an operator reads a value, or its result's shape depends on values."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import batchnorm

from memcallback.core.code_lines import lines_inside
from memcallback.core.tensors import dense_parts, sparse_tensor
from memcallback.core.types import Phase
from memcallback.cuda.op_call import OpCall
from memcallback.trace.dispatch.entries import Entry
from memcallback.trace.dispatch.ledger import TRACER, Ledger
from memcallback.trace.dispatch.values import KnownValues

_aten = torch.ops.aten
_LARGEST = "{} has a shape that depends on values: the largest possible was assumed."
_OF_THIS_BATCH = "{} has a shape that depends on values: that of this batch was taken."
_READ = "The step's code reads a value of a tensor{}, which is unknown here: {!r} was assumed ({})."
_BRANCH = "If a branch depends on it, the one that was not taken may need more."
_MORE_READS = "Other lines of the step's code read such values, too."
#: So many lines that read values are named.
_MAX_LINES = 3


class NoPlaceholder(NotImplementedError):
    """There is no placeholder for a value; the text says what to use instead."""


#: Operators whose result reads as True: a check of unknown values is assumed to pass.
_HOLD = frozenset(
    {_aten.all.default, _aten.all.dim, _aten._is_all_true.default, _aten.isfinite.default}
)
_ANY = frozenset({_aten.any.default, _aten.any.dim})
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    getattr(getattr(_aten, name), overload): getattr(operator, name)
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Scalar", "Tensor")
}
#: LBFGS keeps a direction whose curvature is above this (torch/optim/lbfgs.py), as in training.
_LBFGS_CURVATURE = 1e-10
#: istft fails where the sum of its windows is below this (ATen/native/SpectralOps.cpp).
_ISTFT_ENVELOPE = 1e-11
_COMBINATIONS: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys(
        (*_ANY, _aten.clone.default, _aten._to_copy.default),
        operator.truth,
    ),
    **dict.fromkeys((_aten.logical_not.default, _aten.bitwise_not.default), operator.not_),
    **dict.fromkeys((_aten.logical_and.default, _aten.bitwise_and.Tensor), operator.and_),
    **dict.fromkeys((_aten.logical_or.default, _aten.bitwise_or.Tensor), operator.or_),
}


class Bounds:
    """Chooses min(growing, fixed) in the first trace of a step and keeps that choice.

    So sizes stay linear in the batch size, and remain upper bounds at other batch sizes.
    """

    def __init__(self) -> None:
        self._is_growing: list[bool] = []
        self.num_asked = 0

    def restart(self) -> int:
        """Begin a trace; return how many choices earlier ones made."""
        self.num_asked = 0
        return len(self._is_growing)

    def forget(self, num_chosen: int) -> None:
        """Keep so many choices only: a trace failed, and another one may make others."""
        del self._is_growing[num_chosen:]

    def repeat(self, start: int, times: int) -> None:
        """Take the choices since `start` so many times again, as the trace does."""
        choices = self._is_growing[start : self.num_asked]
        if self.num_asked == len(self._is_growing):
            self._is_growing += choices * times
        self.num_asked += times * len(choices)

    def smaller(self, growing: int, fixed: int) -> int:
        """Return min(growing, fixed) in the first trace, and the same choice in later ones."""
        if self.num_asked == len(self._is_growing):
            self._is_growing.append(growing < fixed)
        self.num_asked += 1
        return growing if self._is_growing[self.num_asked - 1] else fixed


class Placeholders:
    """What is taken for the values that fakes do not have: known ones, else placeholders.

    Attributes:
        bounds: Choices that all traces of a step share.
        open_shapes: The operators for whose results the largest possible shape was taken.
        reads: A sentence for each line of code that has read an unknown value, a few at most.
    """

    def __init__(self, values: KnownValues, bounds: Bounds, assumed: dict[str, None]) -> None:
        self._values, self._assumed = values, assumed
        self.bounds = bounds
        self.open_shapes: list[str] = []
        self.reads: dict[str, None] = {}

    def value(self, call: OpCall, ledger: Ledger) -> object:
        """What an operator reads from a tensor."""
        known = self._values.read(call)
        if known is not None:
            return known
        value = _placeholder_value(call, ledger.find(call.args[0]))
        # The optimizer reads counts of steps, and the scaler's search for infinities.
        if ledger.phase is not Phase.OPTIMIZER_STEP:
            self._note_read(call, value)
        return value

    def _note_read(self, call: OpCall, value: object) -> None:
        line, _ = lines_inside(TRACER)
        read = _READ.format("" if line is None else f" at {line}", value, call.operator)
        if read not in self.reads and len(self.reads) >= _MAX_LINES:
            read = _MORE_READS
        self.reads[read] = self._assumed[f"{read} {_BRANCH}"] = None

    def result(self, call: OpCall) -> Any:
        """The largest result of an operator with an open shape, else that of known values."""
        known = self._values.shaped(call) if self._values.decide_shapes else None
        if known is not None:
            self._assumed[_OF_THIS_BATCH.format(call.operator)] = None
            return known
        try:
            result = _placeholder_result(call, self.bounds)
        except NoPlaceholder:
            result = self._values.shaped(call)
            if result is None:
                raise
            return result
        if not _leaves_out_ranks():
            self._assumed[_LARGEST.format(call.operator)] = None
            self.open_shapes.append(call.operator)
        return result


def _leaves_out_ranks() -> bool:
    """Whether SyncBatchNorm runs, which leaves out ranks without samples: there are none."""
    sync_batch_norm: Any = vars(batchnorm)["sync_batch_norm"]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not sync_batch_norm.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _placeholder_value(call: OpCall, entry: Entry | None) -> bool | int | float | complex:
    """The placeholder for a value read from a tensor: its known truth value, else 0 or 1.

    It is 1 for a count on the host.
    """
    tensor = call.args[0]
    assert isinstance(tensor, torch.Tensor)
    if call.op is _aten.equal.default:
        # C++ reads a single truth value by comparing it with true (`is_scalar_tensor_true`,
        # TensorUtils.h).
        return (
            entry.is_truth
            if tensor.dtype is torch.bool and not tensor.dim() and entry is not None
            else True
        )
    return _number(tensor, entry)


def is_known_to_hold(call: OpCall, find: Callable[[torch.Tensor], Entry | None]) -> bool | None:
    """The result as a truth value, computed from placeholders; None if it is none.

    A check of all values is assumed to pass: most programs check in order to fail.
    """
    func, args = call.op, call.args
    if func in _HOLD:
        return True
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if func in _ANY and (tensors[0].is_floating_point() or tensors[0].is_complex()):
        return True  # weights and gradients are not all zero
    if func is _aten.gt.Scalar and args[1] == _LBFGS_CURVATURE:
        return True
    if func is _aten.lt.Scalar and args[1] == _ISTFT_ENVELOPE:
        return False
    if func in _COMPARISONS:
        left, right = (
            _number(arg, find(arg)) if isinstance(arg, torch.Tensor) else arg for arg in args[:2]
        )
        return bool(_COMPARISONS[func](left, right))
    if func in _COMBINATIONS and all(tensor.dtype is torch.bool for tensor in tensors):
        entries = [find(tensor) for tensor in tensors]
        return bool(
            _COMBINATIONS[func](*(entry is not None and entry.is_truth for entry in entries))
        )
    return None


def _number(tensor: torch.Tensor, entry: Entry | None) -> bool | int | float | complex:
    value = 1 if entry is not None and entry.is_host else 0
    if tensor.is_complex():
        return 0j
    if tensor.dtype is torch.bool:
        return entry is not None and entry.is_truth
    return float(value) if tensor.is_floating_point() else value


def _placeholder_result(call: OpCall, bounds: Bounds) -> Any:
    """The largest possible result of an operator with a value-dependent shape."""
    if call.op is _aten._coalesce.default:
        return _coalesce(call.args[0], bounds)
    rule = _SHAPES.get(call.op) or _OF_LIBRARIES.get(call.operator)
    if rule is None:
        raise NoPlaceholder(
            f"{call.op} makes a tensor whose shape depends on values, for which no largest size is "
            "known. Compute it outside of the step, or give the operator the size "
            "(repeat_interleave takes output_size, bincount minlength)."
        )
    return rule(*call.args, **call.kwargs)


def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Every box is kept: none overlaps another."""
    return boxes.new_empty(boxes.shape[0], dtype=torch.int64)


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel())


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """A mask selects at most every element."""
    whole: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            whole += [
                tensor.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())
            ]
        else:
            whole.append(index)
    return _aten.index.Tensor(tensor, whole)  # type: ignore[no-any-return]


def _unique2(
    tensor: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, ...]:
    flat = tensor.new_empty(tensor.numel())
    inverse = tensor.new_empty(
        tensor.shape if return_inverse or return_counts else 0, dtype=torch.int64
    )
    counts = tensor.new_empty(tensor.numel() if return_counts else 0, dtype=torch.int64)
    return flat, inverse, counts


def _unique_dim(
    tensor: torch.Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, ...]:
    counts = tensor.new_empty(tensor.shape[dim], dtype=torch.int64)
    return torch.empty_like(tensor), counts, torch.empty_like(counts)


def _bincount(
    tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    if not minlength:
        raise NoPlaceholder(
            "aten.bincount makes a number for each value from 0 to the largest, which is not "
            "known. Give it minlength, which is used instead."
        )
    return tensor.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def _coalesce(sparse: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """All specified elements, up to the size of the tensor."""
    indices, values = dense_parts(sparse)
    count = bounds.smaller(values.shape[0], math.prod(sparse.shape[: indices.shape[0]]))
    # A single row of them keeps the memory of all.
    num_kept = max(count, indices.shape[1]) if indices.shape[0] == 1 else count
    rows = indices.new_empty(indices.shape[0], num_kept)[:, :count]
    return sparse_tensor(
        rows, values.new_empty(count, *values.shape[1:]), sparse.shape, is_coalesced=True
    )


#: Operators with a value-dependent shape, for which fake kernels return the smallest result.
SILENT = frozenset({_aten._coalesce.default})
_SHAPES: dict[Any, Any] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique2,
    _aten.unique_dim.default: _unique_dim,
    _aten.bincount.default: _bincount,
}
_OF_LIBRARIES: dict[str, Any] = {"torchvision::nms": _nms}
