"""Kernels of reductions, and the buffers of a reduction that is split over thread blocks.

Follows `setReduceConfig` and `gpu_reduce_kernel` of ATen/native/cuda/Reduce.cuh, and the order and
merging of dimensions of ATen/TensorIterator.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.units import round_down_to_power_of_2
from memcallback.cuda.op_call import (
    KernelBuilder,
    OpCall,
    Rule,
    accumulate_bytes,
    is_low,
)
from memcallback.devices.catalogue import DeviceSpec

_WARP = 32
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Reducer:
    """How one kind of reduction is compiled.

    Attributes:
        partial_bytes: Size of a partial result (`arg_t`).
        values_per_thread: Elements that a thread reads at once (`vt0`).
        vector: Elements that are loaded at once if the reduced dimension is contiguous
            (`input_vec_size`).
    """

    partial_bytes: int
    values_per_thread: int = 4
    vector: int = 4


@dataclass(slots=True)
class _Dim:
    size: int
    out_stride: int
    in_stride: int


def _arranged(shape: Sequence[int], strides: Sequence[int], reduced: Sequence[bool]) -> list[_Dim]:
    """Order dimensions as `TensorIterator`: reduced first, fastest first, neighbours merged."""
    out_strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        if not reduced[d]:
            out_strides[d] = step
            step *= max(shape[d], 1)
    dims = [_Dim(shape[d], out_strides[d], strides[d]) for d in reversed(range(len(shape)))]
    for i in range(1, len(dims)):
        moving = i
        for other in reversed(range(i)):
            order = _order(dims[other], dims[moving])
            if order > 0:
                dims[other], dims[moving] = dims[moving], dims[other]
                moving = other
            elif order < 0:
                break
    merged = dims[:1]
    for dim in dims[1:]:
        last = merged[-1]
        if (
            last.size == 1
            or dim.size == 1
            or (
                last.out_stride * last.size == dim.out_stride
                and last.in_stride * last.size == dim.in_stride
            )
        ):
            if last.size == 1:
                last.out_stride, last.in_stride = dim.out_stride, dim.in_stride
            last.size *= dim.size
        else:
            merged.append(dim)
    return merged


def _order(a: _Dim, b: _Dim) -> int:
    """Above 0 if `b` comes before `a`: `should_swap` (TensorIterator.cpp)."""
    if (a.out_stride == 0) != (b.out_stride == 0):
        return 1 if b.out_stride == 0 else -1
    for x, y in ((a.out_stride, b.out_stride), (a.in_stride, b.in_stride)):
        if x == 0 or y == 0:
            continue
        if x != y:
            return 1 if x > y else -1
        if a.size > b.size:
            return 1
    return 0


def _parts(dims: list[_Dim], itemsize: int) -> list[list[_Dim]]:
    """Split into parts with 32-bit indices: `TensorIterator::with_32bit_indexing`.

    Of parts of the same size one is given: a search for a batch size may ask for millions.
    """
    parts, left, seen = [], [dims], set()
    while left:
        whole = left.pop()
        sizes = tuple(dim.size for dim in whole)
        if sizes in seen:
            continue
        seen.add(sizes)
        if (
            math.prod(sizes) <= _INT32_MAX
            and 1 + sum((d.size - 1) * d.in_stride * itemsize for d in whole) <= _INT32_MAX
        ):
            parts.append(whole)
            continue
        extents = [(dim.size - 1) * max(dim.in_stride, dim.out_stride) * itemsize for dim in whole]
        widest = extents.index(max(extents))
        size = whole[widest].size
        for half in (size // 2, size - size // 2):
            part = [_Dim(d.size, d.out_stride, d.in_stride) for d in whole]
            part[widest].size = half
            left.append(part)
    return parts


@lru_cache(maxsize=4096)
def _buffers(
    num_multiprocessors: int,
    max_threads: int,
    itemsize: int,
    reducer: Reducer,
    reduced: tuple[bool, ...],
    *numbers: int,
) -> tuple[int, int]:
    """Bytes of buffer and semaphores of the largest part."""
    ndim = len(reduced)
    shape, strides = numbers[:ndim], numbers[ndim:]
    if 0 in shape:
        return 0, 0
    parts = _parts(_arranged(shape, strides, reduced), itemsize)
    return max(
        (_config(part, itemsize, reducer, num_multiprocessors, max_threads) for part in parts),
        default=(0, 0),
    )


def _config(
    dims: list[_Dim], itemsize: int, reducer: Reducer, num_multiprocessors: int, max_threads: int
) -> tuple[int, int]:
    """Bytes of buffer and semaphores, as `setReduceConfig` chooses the blocks.

    See `ReduceConfig::global_memory_size` and `semaphore_size`.
    """
    num_reduced = sum(dim.out_stride == 0 for dim in dims)
    num_outputs = math.prod(dim.size for dim in dims if dim.out_stride != 0)
    num_inputs = math.prod(dim.size for dim in dims) // num_outputs
    fastest_reduced = num_reduced == len(dims) or (
        num_reduced > 0 and dims[0].in_stride < dims[num_reduced].in_stride
    )
    across, along = (num_inputs, num_outputs) if fastest_reduced else (num_outputs, num_inputs)
    fastest = (dims[0].in_stride if fastest_reduced else dims[num_reduced].in_stride) if dims else 1
    output_vector = 1
    if fastest == 1:
        if fastest_reduced and across >= 128 and num_reduced == 1:
            across //= reducer.vector
        elif not fastest_reduced:
            output_vector = 4
            for n in (
                dims[num_reduced].size,
                *(d.in_stride for i, d in enumerate(dims) if i != num_reduced),
            ):
                while n % output_vector:
                    output_vector //= 2
            across //= output_vector
    most = 512 // output_vector
    across_2 = min(round_down_to_power_of_2(across), most) if across < most else most
    along_2 = min(round_down_to_power_of_2(along), most) if along < most else most
    width = min(across_2, _WARP)
    height = min(along_2, most // width)
    width = min(across_2, most // height)
    step_in = width if fastest_reduced else 1
    step_out = 1 if fastest_reduced else width
    if -(-num_inputs // step_in) < min(height * 16, 256):
        return 0, 0
    step_in *= height
    values = -(-num_inputs // step_in)
    grid = -(-(num_outputs // output_vector) // step_out)
    target = num_multiprocessors * (max_threads // (width * height))
    if values < 256 or grid > target:
        return 0, 0
    num_blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    if num_blocks <= 1:
        return 0, 0
    size = reducer.partial_bytes * num_outputs * num_blocks
    if not fastest_reduced:
        size *= width * output_vector
    return size, 4 * grid


def channel_sum_bytes(
    shape: Sequence[int], strides: Sequence[int], is_double: bool, itemsize: int, device: DeviceSpec
) -> tuple[int, int]:
    """Buffer and semaphores of a sum over all dimensions but the channels, in one launch.

    PyTorch splits sums of more than 2^31 elements, which is ignored here.
    """
    if 0 in shape:
        return 0, 0
    dims = _arranged(shape, strides, [dim != 1 for dim in range(len(shape))])
    reducer = Reducer(8 if is_double else 4, vector=8 if itemsize == 2 else 4)
    return _config(
        dims, itemsize, reducer, device.num_multiprocessors, device.max_threads_per_multiprocessor
    )


def accumulation_bytes(
    itemsize: int, partial_bytes: int, reduced: tuple[bool, ...], *numbers: int
) -> int:
    """`AccumulationBuffer`, in which half types with more than 2^31 - 1 bytes are summed."""
    ndim = len(reduced)
    shape, strides = numbers[:ndim], numbers[ndim:]
    dims = [] if 0 in shape else _arranged(shape, strides, reduced)
    if 0 in shape or _parts(dims, itemsize) == [dims]:
        return 0
    return partial_bytes * math.prod(s for s, r in zip(shape, reduced, strict=True) if not r)


def add_reduction(
    kernel: KernelBuilder,
    device: DeviceSpec,
    reducer: Reducer,
    itemsize: int,
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Sequence[bool],
    *,
    accumulates: bool = False,
) -> None:
    """Allocate and free the buffers of one reduction."""
    card = (
        device.num_multiprocessors,
        device.max_threads_per_multiprocessor,
        itemsize,
        reducer,
        tuple(reduced),
    )
    numbers = (*shape, *strides)
    sums = (
        kernel.alloc(accumulation_bytes(itemsize, reducer.partial_bytes, tuple(reduced), *numbers))
        if accumulates
        else None
    )
    buffer_bytes, semaphore_bytes = _buffers(*card, *numbers)
    buffer, semaphores = kernel.alloc(buffer_bytes), kernel.alloc(semaphore_bytes)
    kernel.free(semaphores, buffer, sums)


def _dims(value: Any) -> Sequence[int]:
    return [value] if isinstance(value, int) else value or ()


def _sum(call: OpCall) -> Kernel:
    """`sum_out` and `make_reduction` (ReduceOpsUtils.h).

    An input of another dtype is copied to the output's dtype first, but for half types summed to
    float32.
    """
    x, output = call.arguments[0], call.outputs[0]
    kernel = KernelBuilder()
    kernel.output(0)
    direct = x.dtype == output.dtype or (is_low(x.dtype) and output.dtype == torch.float32)
    copy = None if direct else kernel.alloc(x.numel() * output.element_size())
    _reduce(kernel, call, Reducer(accumulate_bytes(output.dtype)), None if direct else output.dtype)
    kernel.free(copy)
    return kernel.build()


def _reduce(
    kernel: KernelBuilder,
    call: OpCall,
    reducer: Reducer,
    dtype: torch.dtype | None = None,
    dims: Any = None,
) -> None:
    x = call.arguments[0]
    if dims is None and len(call.arguments) > 1 and call.name not in ("linalg_vector_norm", "norm"):
        dims = call.arguments[1]
    dims = _dims(dims) if not isinstance(dims, torch.dtype) else ()
    chosen = {d % max(x.ndim, 1) for d in dims} if len(dims) else set(range(x.ndim))
    strides = x.stride() if dtype is None else torch.empty_like(x, device="meta").stride()
    itemsize = x.element_size() if dtype is None else dtype.itemsize
    same_low = is_low(x.dtype) and call.outputs[0].dtype == x.dtype
    add_reduction(
        kernel,
        call.device,
        reducer,
        itemsize,
        x.shape,
        strides,
        [d in chosen for d in range(x.ndim)],
        accumulates=same_low,
    )


def _simple(partial: Callable[[torch.dtype], int], vector: int = 4, dims_at: int = 1) -> Rule:
    """The outputs, then one reduction; `partial` is the size of `arg_t`."""

    def rule(call: OpCall) -> Kernel:
        kernel = KernelBuilder()
        kernel.output(*range(len(call.outputs)))
        dims = call.arguments[dims_at] if len(call.arguments) > dims_at else None
        _reduce(
            kernel,
            call,
            Reducer(partial(call.arguments[0].dtype), vector, vector),
            dims=() if dims is None else dims,
        )
        return kernel.build()

    return rule


def _logsumexp(call: OpCall) -> Kernel:
    """`logsumexp_out_impl` (ReduceOps.cpp): the sum of exp(x - max(x))."""
    x, output = call.arguments[0], call.outputs[0]
    kernel = KernelBuilder()
    size_bytes = output.numel() * output.element_size()
    largest = kernel.alloc(size_bytes)
    _reduce(kernel, call, Reducer(_own(output.dtype)), dims=call.arguments[1])
    # Where the largest is infinite it counts as 0.
    absolute, is_infinite = kernel.alloc(size_bytes), kernel.alloc(output.numel())
    kernel.free(is_infinite, absolute)
    shifted = kernel.alloc(x.numel() * output.element_size())
    kernel.output(0)
    _reduce(kernel, call, Reducer(accumulate_bytes(output.dtype)), dims=call.arguments[1])
    kernel.free(shifted, largest)
    return kernel.build()


def _renorm(call: OpCall) -> Kernel:
    """`renorm_out` (Normalization.cpp): norms in the accumulation type, factors in half types."""
    x, _, dim = call.arguments[:3]
    kernel = KernelBuilder()
    kernel.output(0)
    dim %= x.ndim
    norms = kernel.alloc(x.shape[dim] * accumulate_bytes(x.dtype))
    others = [d for d in range(x.ndim) if d != dim]
    _reduce(kernel, call, Reducer(accumulate_bytes(x.dtype)), dims=others)
    factors = kernel.alloc(x.shape[dim] * x.element_size()) if is_low(x.dtype) else None
    kernel.free(factors, norms)
    return kernel.build()


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
    "logsumexp": _logsumexp,
    "renorm": _renorm,
    "argmax": _simple(_pair),
    "argmin": _simple(_pair),
    "any": _simple(_own),
    "all": _simple(_own),
}
