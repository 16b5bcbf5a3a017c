"""Kernels of all other operators: dropout, foreach norms, pooling, FFT, cdist."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.torch_private import suggest_memory_format
from memcallback.cuda.kernels.reduction import Reducer, add_reduction
from memcallback.cuda.kernels.sort import add_topk
from memcallback.cuda.op_call import (
    KernelBuilder,
    OpCall,
    Rule,
    accumulate_bytes,
    dense_bytes,
    is_dense_in_any_order,
    is_low,
    output_then_copy,
)

_UPSAMPLINGS = (
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_linear1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_bilinear2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_trilinear3d",
)
#: Values that one block of `multi_tensor_apply` reads (MultiTensorApply.cuh).
_CHUNK = 65536


def _mask_first(call: OpCall) -> Kernel:
    """`native_dropout_cuda` (Dropout.cu): the mask before the output."""
    kernel = KernelBuilder()
    kernel.output(*reversed(range(len(call.outputs))))
    return kernel.build()


def _upsampling_backward(call: OpCall) -> Kernel:
    """Upsampling (UpSampleNearest2d.cu and others): contiguous copies of gradient and result.

    Images of equal size are copied. Those of four channels or more, channels last, stay so.
    """
    grad, result = call.inputs[0], call.outputs[0]
    is_image = grad.dim() == 4
    kernel = KernelBuilder()
    kernel.output(0)
    if is_image and grad.shape == result.shape:
        return kernel.build()
    last = torch.channels_last
    if (
        is_image
        and grad.shape[1] >= 4
        and suggest_memory_format(grad) is last
        and result.is_contiguous(memory_format=last)
    ):
        if not grad.is_contiguous(memory_format=last):
            kernel.free(kernel.alloc(dense_bytes(grad)))
        return kernel.build()
    copies = [kernel.alloc_copy(one) for one in ((result, grad) if is_image else (grad, result))]
    kernel.free(*reversed(copies))
    return kernel.build()


def foreach_norm_bytes(wide: int, *counts: int) -> int:
    """`output_per_tensor` (ForeachReduceOp.cu): a partial result per tensor and chunk.

    The chunks are those of the largest tensor.
    """
    return wide * len(counts) * max(1, -(-max(counts) // _CHUNK))


def _foreach_norm(call: OpCall) -> Kernel | None:
    """`foreach_tensor_norm_cuda` (ForeachReduceOp.cu): partial results, then the outputs.

    The partial results are in the accumulation type.
    """
    tensors = call.arguments[0]
    order = call.arguments[1] if len(call.arguments) > 1 else 2
    first = tensors[0]
    same = all(t.dtype == first.dtype and t.numel() and is_dense_in_any_order(t) for t in tensors)
    if not same or order not in (1, 2, float("inf")):
        return None
    kernel = KernelBuilder()
    partial = kernel.alloc(
        foreach_norm_bytes(accumulate_bytes(first.dtype), *(t.numel() for t in tensors))
    )
    kernel.output(*range(len(call.outputs)))
    kernel.free(partial)
    return kernel.build()


def _roll(call: OpCall) -> Kernel | None:
    """`roll_common` (TensorTransformations.h): one dimension at a time, the last is the output.

    The first is rolled in a contiguous copy. All others are kept until the end.
    """
    x, shifts = call.arguments[:2]
    if not shifts or not x.numel():
        return None
    kernel = KernelBuilder()
    copy = kernel.alloc_copy(x)
    rolled = []
    for _ in shifts[:-1]:
        rolled.append(kernel.alloc(dense_bytes(x)))
        kernel.free(copy)
        copy = None
    kernel.output(0)
    kernel.free(copy, *reversed(rolled))
    return kernel.build()


def _bernoulli(call: OpCall) -> Kernel | None:
    """`bernoulli_tensor_cuda_kernel` (DistributionBernoulli.cu) copies half types to float32."""
    x = call.arguments[0]
    if not is_low(x.dtype) or len(call.arguments) > 2:
        return None
    kernel = KernelBuilder()
    kernel.output(0)
    kernel.free(kernel.alloc(x.numel() * 4))
    return kernel.build()


def _full_max(call: OpCall) -> Kernel | None:
    """`max_all_kernel_impl`, and `max` over a dimension (ReduceMaxValuesKernel.cu).

    The second reduces values with their indices. The largest of all is that of a contiguous copy
    (`max` in ReduceAllOps.cpp).
    """
    x, dims = call.arguments[0], call.arguments[1:]
    if dims and isinstance(dims[0], torch.Tensor):
        return None
    kernel = KernelBuilder()
    kernel.output(*range(len(call.outputs)))
    has_dim = dims and isinstance(dims[0], int)
    copy = kernel.alloc_copy(x) if not has_dim and call.name != "aminmax" else None
    strides = x.stride() if copy is None else torch.empty(x.shape, device="meta").stride()
    chosen = [not has_dim or d == dims[0] % max(x.ndim, 1) for d in range(x.ndim)]
    size = 16 if has_dim else 2 * x.element_size() if call.name == "aminmax" else x.element_size()
    add_reduction(kernel, call.device, Reducer(size), x.element_size(), x.shape, strides, chosen)
    kernel.free(copy)
    return kernel.build()


def _infinite(call: OpCall) -> Kernel:
    """`isinf` and `isfinite` (TensorCompare.cpp): the absolute value; two masks for `isfinite`."""
    x = call.arguments[0]
    kernel = KernelBuilder()
    temps = [kernel.alloc(dense_bytes(x))]
    if call.name == "isfinite":
        temps += [kernel.alloc(x.numel()), kernel.alloc(x.numel())]
    kernel.output(0)
    kernel.free(*reversed(temps))
    return kernel.build()


def _workspace_first(call: OpCall) -> Kernel:
    """`_thnn_fused_lstm_cell_cuda` (RNN.cu): the saved gates before the states."""
    kernel = KernelBuilder()
    kernel.output(2, 0, 1)
    return kernel.build()


def _power(call: OpCall) -> Kernel | None:
    """`pow` of a number to a tensor (Pow.cpp): the number as a tensor of 8 bytes."""
    if isinstance(call.arguments[0], torch.Tensor):
        return None
    kernel = KernelBuilder()
    kernel.output(0)
    kernel.free(kernel.alloc(8))
    return kernel.build()


def _where(call: OpCall) -> Kernel | None:
    """`where_self_out` (TensorCompare.cpp): operands of another dtype are copied first."""
    output = call.outputs[0] if call.outputs else None
    others = [
        t
        for t in call.arguments[1:]
        if isinstance(t, torch.Tensor) and output is not None and t.dtype != output.dtype
    ]
    if output is None or not others:
        return None
    kernel = KernelBuilder()
    copies = [kernel.alloc(t.numel() * output.element_size()) for t in others]
    kernel.output(0)
    kernel.free(*reversed(copies))
    return kernel.build()


def _size_of_complex(call: OpCall) -> Kernel | None:
    """`unary_op_impl_with_complex_to_float_out` (UnaryOps.cpp).

    A complex result is copied into the real output.
    """
    x = call.arguments[0]
    if not x.is_complex():
        return None
    kernel = KernelBuilder()
    if call.name == "angle":
        whole = kernel.alloc(dense_bytes(x))
        kernel.output(0)
    else:
        kernel.output(0)
        whole = kernel.alloc(dense_bytes(x))
    kernel.free(whole)
    return kernel.build()


def _fft(call: OpCall) -> Kernel | None:
    """`_exec_fft` (SpectralOps.cpp): a copy of an input that cuFFT cannot read as it is.

    Before a transform to real numbers the input is copied in any case, since cuFFT overwrites it.
    From real numbers the first two dimensions are transformed one after the other, into a second
    output. cuFFT's own workspace is unknown, and so is what more than three dimensions need.
    """
    x, dims = call.arguments[:2]
    dims = [dim % x.ndim for dim in dims]
    is_to_real = call.name == "_fft_c2r"
    if not dims or (len(dims) > 3 and not is_to_real):
        return None
    kernel = KernelBuilder()
    kernel.output(0)
    if call.name == "_fft_r2c" and dims[:2] == [0, 1]:  # `use_optimized_cufft_path`
        kernel.free(kernel.alloc(dense_bytes(call.outputs[0])))
        return kernel.build()
    whole = kernel.alloc(dense_bytes(x)) if is_to_real else None
    strides = torch.empty(x.shape, device="meta").stride() if is_to_real else x.stride()
    if call.name == "_fft_c2c":
        dims.sort(key=lambda dim: -strides[dim])  # `_sort_dims`
    copied = kernel.alloc(dense_bytes(x)) if _is_copied_for_fft(x.shape, strides, dims) else None
    kernel.free(copied, whole)
    return kernel.build()


def _is_copied_for_fft(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether the other dimensions cannot be viewed as one, or cuFFT cannot use the strides.

    cuFFT reads no stride of 0, and only strides that are multiples of the next one
    (`as_cufft_embed` in CuFFTPlanCache.h).
    """
    others = [dim for dim in range(len(shape)) if dim not in dims and shape[dim] != 1]
    others.sort(key=lambda dim: -strides[dim])
    if any(strides[one] != strides[next_] * shape[next_] for one, next_ in pairwise(others)):
        return True
    if strides[dims[-1]] <= 0 or (others and strides[others[-1]] == 0):
        return True
    inner = strides[dims[-1]]
    for dim in reversed(dims[:-1]):
        if shape[dim] != 1:
            if strides[dim] <= 0 or strides[dim] % inner:
                return True
            inner = strides[dim]
    return False


def _distances(call: OpCall) -> Kernel | None:
    """`_euclidean_dist` (Distance.cpp): squared lengths, and factors with two more columns.

    `cdist` uses it for more than 25 rows.
    """
    a, b = call.arguments[:2]
    if call.name == "_cdist_forward":
        p, mode = call.arguments[2:4]
        if p != 2 or mode == 2 or (mode != 1 and max(a.shape[-2], b.shape[-2]) <= 25):
            return None
    if not a.numel() or not b.numel():
        return None
    kernel = KernelBuilder()

    def lengths(x: torch.Tensor) -> list[int]:
        squares = kernel.alloc(dense_bytes(x))
        sums = kernel.alloc(dense_bytes(x) // x.shape[-1])
        kernel.free(squares)
        return [sums, kernel.alloc(dense_bytes(x) // x.shape[-1])]

    of_a, of_b = lengths(a), lengths(b)
    scaled = kernel.alloc(dense_bytes(a))
    first = kernel.alloc(dense_bytes(a) // a.shape[-1] * (a.shape[-1] + 2))
    kernel.free(*reversed(of_a), scaled)
    second = kernel.alloc(dense_bytes(b) // b.shape[-1] * (b.shape[-1] + 2))
    kernel.free(*of_b)
    kernel.output(0)
    kernel.free(second, first)
    return kernel.build()


def _pair_distances_backward(call: OpCall) -> Kernel:
    """`_pdist_backward_cuda` (DistanceKernel.cu): each row's part in each distance, then summed."""
    x = call.arguments[1]
    rows, columns = x.shape
    kernel = KernelBuilder()
    kernel.output(0)
    if x.numel() and rows > 1:
        parts = kernel.alloc((rows - 1) * rows * columns * x.element_size())
        shape, strides = (rows - 1, rows, columns), (rows * columns, columns, 1)
        reducer = Reducer(accumulate_bytes(x.dtype))
        add_reduction(
            kernel, call.device, reducer, x.element_size(), shape, strides, (True, False, False)
        )
        kernel.free(parts)
    return kernel.build()


def _distances_backward(call: OpCall) -> Kernel:
    """`cdist_backward_kernel_impl` (DistanceKernel.cu): a term per pair of rows, then their sum."""
    _, a, b = call.arguments[:3]
    *batch, rows, columns = a.shape
    kernel = KernelBuilder()
    kernel.output(0)
    pairs = (*batch, b.shape[-2], rows, columns)
    buffer = kernel.alloc(math.prod(pairs) * a.element_size())
    strides = torch.empty(pairs, device="meta").stride()
    reducer = Reducer(accumulate_bytes(a.dtype))
    add_reduction(
        kernel,
        call.device,
        reducer,
        a.element_size(),
        pairs,
        strides,
        [d == len(batch) for d in range(len(pairs))],
    )
    kernel.free(buffer)
    return kernel.build()


def _multinomial(call: OpCall) -> Kernel:
    """`multinomial_out` (Distributions.cpp): a random number per probability.

    The largest quotients are the samples. Its checks are ignored.
    """
    x, count, replacement = call.arguments[:3]
    kernel = KernelBuilder()
    kernel.output(0)
    if replacement and count > 1:
        temps = [kernel.alloc(dense_bytes(x)) for _ in range(3)]
        kernel.free(*reversed(temps))
        return kernel.build()
    quotients = kernel.alloc(dense_bytes(x))
    if count > 1:
        num_slices = x.numel() // max(x.shape[-1], 1)
        values = kernel.alloc(num_slices * count * x.element_size())
        add_topk(kernel, call.device, x.element_size(), num_slices, x.shape[-1])
        kernel.free(values)
    kernel.free(quotients)
    return kernel.build()


RULES: dict[str, Rule] = {
    "native_dropout": _mask_first,
    "_foreach_norm": _foreach_norm,
    "roll": _roll,
    "bernoulli": _bernoulli,
    "max": _full_max,
    "min": _full_max,
    "aminmax": _full_max,
    "isinf": _infinite,
    "isfinite": _infinite,
    "reflection_pad2d_backward": output_then_copy,
    "reflection_pad2d": output_then_copy,
    "_thnn_fused_lstm_cell": _workspace_first,
    "pow": _power,
    "abs": _size_of_complex,
    "angle": _size_of_complex,
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), _fft),
    "_cdist_forward": _distances,
    "_euclidean_dist": _distances,
    "_cdist_backward": _distances_backward,
    "_pdist_backward": _pair_distances_backward,
    "multinomial": _multinomial,
    "where": _where,
    **{f"{name}_backward": _upsampling_backward for name in _UPSAMPLINGS},
    "upsample_bicubic2d_backward": output_then_copy,
    "_upsample_bilinear2d_aa_backward": output_then_copy,
    "_upsample_bicubic2d_aa_backward": output_then_copy,
}
