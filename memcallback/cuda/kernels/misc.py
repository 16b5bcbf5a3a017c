"""Everything else: dropout, foreach norms, pooling, FFT, cdist."""

from __future__ import annotations

import math

import torch

from memcallback.core.kernel import Kernel
from memcallback.cuda.kernels.call import (
    Call,
    KernelBuilder,
    Rule,
    accumulate_bytes,
    dense_bytes,
    is_low,
)
from memcallback.cuda.kernels.reduction import Reducer, take_reduction
from memcallback.cuda.kernels.sort import topk_steps

#: Values that one block of `multi_tensor_apply` reads (MultiTensorApply.cuh).
_CHUNK = 65536


def _mask_first(call: Call) -> Kernel:
    """`native_dropout_cuda` (Dropout.cu): the mask before the output."""
    steps = KernelBuilder()
    steps.make(*reversed(range(len(call.outputs))))
    return steps.kernel


def foreach_norm_bytes(wide: int, *counts: int) -> int:
    """`output_per_tensor` of `foreach_tensor_norm_cuda` (ForeachReduceOp.cu): a partial result for
    each tensor and chunk of the largest.
    """
    return wide * len(counts) * max(1, -(-max(counts) // _CHUNK))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its extent, in whatever order."""
    return tensor.numel() == 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _foreach_norm(call: Call) -> Kernel | None:
    """`foreach_tensor_norm_cuda` (ForeachReduceOp.cu): partial results in the accumulation type,
    then the outputs.
    """
    tensors = call.args[0]
    order = call.args[1] if len(call.args) > 1 else 2
    one = tensors[0]
    same = all(t.dtype == one.dtype and t.numel() and _is_dense(t) for t in tensors)
    if not same or order not in (1, 2, float("inf")):
        return None
    steps = KernelBuilder()
    partial = steps.take(
        foreach_norm_bytes(accumulate_bytes(one.dtype), *(t.numel() for t in tensors))
    )
    steps.make(*range(len(call.outputs)))
    steps.give(partial)
    return steps.kernel


def _roll(call: Call) -> Kernel | None:
    """`roll_common` (TensorTransformations.h): one dimension at a time, the last one's result is
    the output.
    """
    shifts = call.args[1]
    if len(shifts) < 2:
        return None
    steps = KernelBuilder()
    before: int | None = None
    for _ in shifts[:-1]:
        taken = steps.take(dense_bytes(call.args[0]))
        steps.give(before)
        before = taken
    steps.make(0)
    steps.give(before)
    return steps.kernel


def _bernoulli(call: Call) -> Kernel | None:
    """`bernoulli_tensor_cuda_kernel` (DistributionBernoulli.cu): probabilities of a half type are
    copied to float32.
    """
    x = call.args[0]
    if not is_low(x.dtype) or len(call.args) > 2:
        return None
    steps = KernelBuilder()
    steps.make(0)
    steps.give(steps.take(x.numel() * 4))
    return steps.kernel


def _full_max(call: Call) -> Kernel | None:
    """`max_all_kernel_impl` and `max` over a dimension (ReduceMaxValuesKernel.cu): one value, or a
    value with its index.
    """
    x, dims = call.args[0], call.args[1:]
    if dims and isinstance(dims[0], torch.Tensor):
        return None
    steps = KernelBuilder()
    steps.make(*range(len(call.outputs)))
    one = dims and isinstance(dims[0], int)
    chosen = [not one or d == dims[0] % max(x.ndim, 1) for d in range(x.ndim)]
    size = 16 if one else 2 * x.element_size() if call.name == "aminmax" else x.element_size()
    take_reduction(steps, call.device, Reducer(size), x.element_size(), x.shape, x.stride(), chosen)
    return steps.kernel


def _infinite(call: Call) -> Kernel:
    """`isinf` and `isfinite` (TensorCompare.cpp): the absolute value first; for `isfinite` two
    masks.
    """
    x = call.args[0]
    steps = KernelBuilder()
    takes = [steps.take(dense_bytes(x))]
    if call.name == "isfinite":
        takes += [steps.take(x.numel()), steps.take(x.numel())]
    steps.make(0)
    steps.give(*reversed(takes))
    return steps.kernel


def _copied_gradient(call: Call) -> Kernel:
    """Pads and samplers (ReflectionPad.cu, UpSampleBicubic2d.cu): the output, then a contiguous
    copy of the first argument.
    """
    steps = KernelBuilder()
    steps.make(0)
    steps.give(steps.take_copy(call.args[0]))
    return steps.kernel


def _workspace_first(call: Call) -> Kernel:
    """`_thnn_fused_lstm_cell_cuda` (RNN.cu): the gates for backward before the states."""
    steps = KernelBuilder()
    steps.make(2, 0, 1)
    return steps.kernel


def _power(call: Call) -> Kernel | None:
    """`pow` of a number to a tensor (Pow.cpp): the number as a tensor of 8 bytes."""
    if isinstance(call.args[0], torch.Tensor):
        return None
    steps = KernelBuilder()
    steps.make(0)
    steps.give(steps.take(8))
    return steps.kernel


def _where(call: Call) -> Kernel | None:
    """`where_self_out` (TensorCompare.cpp): what has not the result's dtype is copied first."""
    output = call.outputs[0] if call.outputs else None
    others = [
        t
        for t in call.args[1:]
        if isinstance(t, torch.Tensor) and output is not None and t.dtype != output.dtype
    ]
    if output is None or not others:
        return None
    steps = KernelBuilder()
    copies = [steps.take(t.numel() * output.element_size()) for t in others]
    steps.make(0)
    steps.give(*reversed(copies))
    return steps.kernel


def _max_pool_backward(call: Call) -> Kernel | None:
    """`max_pool2d_with_indices_backward_cuda` (DilatedMaxPool2d.cu): gradient, input and indices in
    the layout that the input suggests.
    """
    grad, x, indices = call.args[0], call.args[1], call.args[-1]
    is_last = (
        x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and not x.is_contiguous()
    )
    layout = torch.channels_last if is_last else torch.contiguous_format
    steps = KernelBuilder()
    steps.make(0)
    copies = [
        steps.take(dense_bytes(tensor))
        for tensor in (grad, x, indices)
        if not tensor.is_contiguous(memory_format=layout)
    ]
    steps.give(*reversed(copies))
    return steps.kernel if copies else None


def _size_of_complex(call: Call) -> Kernel | None:
    """`unary_op_impl_with_complex_to_float_out` (UnaryOps.cpp): a complex result first, copied into
    the real output.
    """
    x = call.args[0]
    if not x.is_complex():
        return None
    steps = KernelBuilder()
    if call.name == "angle":
        whole = steps.take(dense_bytes(x))
        steps.make(0)
    else:
        steps.make(0)
        whole = steps.take(dense_bytes(x))
    steps.give(whole)
    return steps.kernel


def _fft_to_real(call: Call) -> Kernel:
    """`_fft_c2r_cufft` (SpectralOps.cpp): cuFFT overwrites its input, which is a copy. What cuFFT
    takes for itself is not known.
    """
    steps = KernelBuilder()
    steps.make(0)
    steps.give(steps.take(dense_bytes(call.args[0])))
    return steps.kernel


def _distances(call: Call) -> Kernel | None:
    """`_euclidean_dist` (Distance.cpp), to which `cdist` goes for more than 25 rows: squares of
    lengths, products with one more column each.
    """
    a, b = call.args[:2]
    if call.name == "_cdist_forward":
        p, mode = call.args[2:4]
        if p != 2 or mode == 2 or (mode != 1 and max(a.shape[-2], b.shape[-2]) <= 25):
            return None
    if not a.numel() or not b.numel():
        return None
    steps = KernelBuilder()

    def lengths(x: torch.Tensor) -> list[int]:
        squares = steps.take(dense_bytes(x))
        sums = steps.take(dense_bytes(x) // x.shape[-1])
        steps.give(squares)
        return [sums, steps.take(dense_bytes(x) // x.shape[-1])]

    of_a, of_b = lengths(a), lengths(b)
    scaled = steps.take(dense_bytes(a))
    first = steps.take(dense_bytes(a) // a.shape[-1] * (a.shape[-1] + 2))
    steps.give(*reversed(of_a), scaled)
    second = steps.take(dense_bytes(b) // b.shape[-1] * (b.shape[-1] + 2))
    steps.give(*of_b)
    steps.make(0)
    steps.give(second, first)
    return steps.kernel


def _distances_backward(call: Call) -> Kernel:
    """`cdist_backward_kernel_impl` (DistanceKernel.cu): what each pair of rows adds, then summed."""
    _, a, b = call.args[:3]
    *batch, rows, columns = a.shape
    steps = KernelBuilder()
    steps.make(0)
    pairs = (*batch, b.shape[-2], rows, columns)
    buffer = steps.take(math.prod(pairs) * a.element_size())
    strides = torch.empty(pairs, device="meta").stride()
    reducer = Reducer(accumulate_bytes(a.dtype))
    take_reduction(
        steps,
        call.device,
        reducer,
        a.element_size(),
        pairs,
        strides,
        [d == len(batch) for d in range(len(pairs))],
    )
    steps.give(buffer)
    return steps.kernel


def _multinomial(call: Call) -> Kernel:
    """`multinomial_out` (Distributions.cpp): a random number for each probability; the largest
    quotients are the samples. Its checks are left out.
    """
    x, count, replacement = call.args[:3]
    steps = KernelBuilder()
    steps.make(0)
    if replacement and count > 1:
        takes = [steps.take(dense_bytes(x)) for _ in range(3)]
        steps.give(*reversed(takes))
        return steps.kernel
    quotients = steps.take(dense_bytes(x))
    if count > 1:
        num_slices = x.numel() // max(x.shape[-1], 1)
        values = steps.take(num_slices * count * x.element_size())
        topk_steps(
            steps, call.device.num_multiprocessors, x.element_size(), num_slices, x.shape[-1]
        )
        steps.give(values)
    steps.give(quotients)
    return steps.kernel


RULES: dict[str, Rule] = {
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "native_dropout": _mask_first,
    "_foreach_norm": _foreach_norm,
    "roll": _roll,
    "bernoulli": _bernoulli,
    "max": _full_max,
    "min": _full_max,
    "aminmax": _full_max,
    "isinf": _infinite,
    "isfinite": _infinite,
    "reflection_pad2d_backward": _copied_gradient,
    "reflection_pad2d": _copied_gradient,
    "_thnn_fused_lstm_cell": _workspace_first,
    "pow": _power,
    "abs": _size_of_complex,
    "angle": _size_of_complex,
    "_fft_c2r": _fft_to_real,
    "_cdist_forward": _distances,
    "_euclidean_dist": _distances,
    "_cdist_backward": _distances_backward,
    "multinomial": _multinomial,
    "where": _where,
    "upsample_bicubic2d_backward": _copied_gradient,
    "_upsample_bilinear2d_aa_backward": _copied_gradient,
}
