"""Rules for the operators that reduce dimensions: sum, mean, var, norm, amax, argmax, any, cumulative ones not among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memcallback.cuda_kernels_plan import Call, Rule, Steps, accumulate_bytes, is_low
from memcallback.cuda_kernels_reduce import Reducer, take_reduction
from memcallback.kernels import Kernel


def _dims(value: Any) -> Sequence[int]:
    return [value] if isinstance(value, int) else value or ()


def _sum(call: Call) -> Kernel:
    """`sum_out` and `make_reduction` (ReduceOpsUtils.h): an input that is not read as the output's type is copied to that type first."""
    x, output = call.args[0], call.outputs[0]
    steps = Steps()
    steps.make(0)
    direct = x.dtype == output.dtype or (is_low(x.dtype) and output.dtype == torch.float32)
    copy = None if direct else steps.take(x.numel() * output.element_size())
    _reduce(steps, call, Reducer(accumulate_bytes(output.dtype)), None if direct else output.dtype)
    steps.give(copy)
    return steps.kernel


def _reduce(steps: Steps, call: Call, reducer: Reducer, dtype: torch.dtype | None = None, dims: Any = None) -> None:
    x = call.args[0]
    if dims is None and len(call.args) > 1 and call.name not in ("linalg_vector_norm", "norm"):
        dims = call.args[1]
    dims = _dims(dims) if not isinstance(dims, torch.dtype) else ()
    chosen = {d % max(x.ndim, 1) for d in dims} if len(dims) else set(range(x.ndim))
    strides = x.stride() if dtype is None else torch.empty_like(x, device="meta").stride()
    itemsize = x.element_size() if dtype is None else dtype.itemsize
    same_low = is_low(x.dtype) and call.outputs[0].dtype == x.dtype
    take_reduction(steps, call.device, reducer, itemsize, x.shape, strides, [d in chosen for d in range(x.ndim)], accumulates=same_low)


def _simple(partial: Callable[[torch.dtype], int], vector: int = 4, dims_at: int = 1) -> Rule:
    """Outputs, then one launch; `partial` is the size of `arg_t`."""

    def rule(call: Call) -> Kernel:
        steps = Steps()
        steps.make(*range(len(call.outputs)))
        dims = call.args[dims_at] if len(call.args) > dims_at else None
        _reduce(steps, call, Reducer(partial(call.args[0].dtype), vector, vector), dims=() if dims is None else dims)
        return steps.kernel

    return rule


def _welford(dtype: torch.dtype) -> int:
    """`WelfordData<acc_t, int32_t>`: mean, m2, a count and the count as a number, aligned."""
    return 16 if accumulate_bytes(dtype) == 4 else 32


def _own(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _pair(dtype: torch.dtype) -> int:
    """A value and its index of 8 bytes, aligned."""
    return 16


RULES: dict[str, Rule] = {
    "sum": _sum,
    "mean": _simple(accumulate_bytes),
    "prod": _simple(accumulate_bytes),
    "var": _simple(_welford, vector=2),
    "std": _simple(_welford, vector=2),
    "var_mean": _simple(_welford, vector=2),
    "std_mean": _simple(_welford, vector=2),
    "linalg_vector_norm": _simple(accumulate_bytes, dims_at=2),
    "norm": _simple(accumulate_bytes, dims_at=2),
    "amax": _simple(_own),
    "amin": _simple(_own),
    "argmax": _simple(_pair),
    "argmin": _simple(_pair),
    "any": _simple(_own),
    "all": _simple(_own),
}
