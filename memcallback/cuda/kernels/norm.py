"""Normalization and softmax."""

from __future__ import annotations

import torch

from memcallback.core.kernel import Kernel
from memcallback.cuda.kernels.call import Call, KernelBuilder, Rule, accumulate_bytes, dense_bytes
from memcallback.cuda.kernels.reduction import Reducer, take_reduction


def _layer_norm(call: Call) -> Kernel:
    """`layer_norm_cuda` (layer_norm_kernel.cu): contiguous copies of input, weight and bias, then
    the outputs.
    """
    steps = KernelBuilder()
    copies = [
        steps.take_copy(t)
        for t in (
            call.args[0],
            call.args[2],
            call.args[3] if call.name == "native_layer_norm" else None,
        )
    ]
    steps.make(*range(len(call.outputs)))
    steps.give(*reversed(copies))
    return steps.kernel


def _layer_norm_backward(call: Call) -> Kernel:
    """`layer_norm_backward_cuda` and `LaunchGammaBetaBackwardCUDAKernel` (layer_norm_kernel.cu).

    Above 64 Ki rows, where the rows are short, the gradients of weight and bias are summed in two
    passes: partial sums of 32 rows each, then `sum(0)` of them, whose result takes the place of the
    output made first.
    """
    grad, x, rms = call.args[0], call.args[1], call.name == "_fused_rms_norm_backward"
    normalized, weight = call.args[2], call.args[4] if rms else call.args[5]
    mask = call.args[-1]
    steps = KernelBuilder()
    copies = [steps.take_copy(t) for t in (x, weight)]
    columns = 1
    for size in normalized:
        columns *= size
    rows = x.numel() // max(columns, 1)
    of_weight = list(range(int(mask[0]), len(call.outputs)))
    two_passes = (
        of_weight and rows > 64 * 1024 and columns // 32 < call.device.num_multiprocessors // 2
    )
    if not two_passes:
        steps.make(*range(len(call.outputs)))
        steps.give(steps.take_copy(grad), *reversed(copies))
        return steps.kernel
    if mask[0]:
        steps.make(0)
    itemsize = call.outputs[of_weight[0]].element_size()
    first = [steps.take(columns * itemsize) for _ in of_weight]
    parts = -(-rows // 32)
    partial = [steps.take(parts * columns * itemsize) for _ in of_weight]
    for output, old in zip(of_weight, first, strict=True):
        steps.make(output)
        reducer = Reducer(accumulate_bytes(call.outputs[output].dtype))
        take_reduction(
            steps, call.device, reducer, itemsize, (parts, columns), (columns, 1), (True, False)
        )
        steps.give(old)
    steps.give(*reversed(partial), *reversed(copies))
    return steps.kernel


def _group_norm(call: Call) -> Kernel:
    """`GroupNormKernelImplInternal` (group_norm_kernel.cu): a scale and a shift for every sample
    and channel, in the accumulation type.
    """
    x, weight, bias, n, channels, width = call.args[:6]
    steps = KernelBuilder()
    steps.make(0, 1, 2)
    if width != 1 and (weight is not None or bias is not None):
        scale = steps.take(n * channels * accumulate_bytes(x.dtype))
        shift = steps.take(n * channels * accumulate_bytes(x.dtype))
        steps.give(shift, scale)
    return steps.kernel


def _group_norm_backward(call: Call) -> Kernel:
    """`GroupNormBackwardKernelImplInternal` (group_norm_kernel.cu): two sums a sample and channel,
    three factors for the input's gradient.
    """
    _, x, _, _, weight, n, channels, width, groups, mask = call.args
    wide = accumulate_bytes(x.dtype)
    steps = KernelBuilder()
    steps.make(*range(len(call.outputs)))
    sums = [steps.take(n * channels * wide) for _ in range(2)]
    if mask[0]:
        second, third = steps.take(n * groups * wide), steps.take(n * groups * wide)
        first = steps.take(n * channels * wide) if weight is not None and width != 1 else None
        steps.give(third, second, first)
    steps.give(*reversed(sums))
    return steps.kernel


def _softmax(call: Call) -> Kernel:
    """`host_softmax` (SoftMax.cu): the output, then a contiguous copy of the input."""
    steps = KernelBuilder()
    steps.make(0)
    steps.give(steps.take_copy(call.args[0]))
    return steps.kernel


def _safe_softmax(call: Call) -> Kernel:
    """`_safe_softmax` (attention.cpp): the softmax, then which rows are masked in all places, and
    the zero that they become.
    """
    x, output = call.args[0], call.outputs[0]
    steps = KernelBuilder()
    steps.make(0)
    steps.give(steps.take_copy(x))
    masked = steps.take(x.numel())
    rows = steps.take(x.numel() // x.shape[call.args[1]] if x.numel() else 0)
    zero = steps.take(output.element_size())
    steps.give(zero, rows, masked)
    return steps.kernel


def _softmax_backward(call: Call) -> Kernel:
    """`softmax_backward_cuda_out` (SoftMax.cu): the output, grad * output as a temporary,
    contiguous copies of both for the kernel.
    """
    grad, y = call.args[:2]
    steps = KernelBuilder()
    steps.make(0)
    product = (
        steps.take(dense_bytes(torch.empty_like(grad, device="meta")))
        if call.name == "_softmax_backward_data"
        else None
    )
    copies = [steps.take_copy(t) for t in (grad, y)]
    steps.give(*reversed(copies), product)
    return steps.kernel


def batch_norm_grid(rows: int, columns: int) -> tuple[int, int]:
    """Blocks over channels and rows: `flexible_launch_configs` with `coop_flag`
    (Normalization.cuh), tiles of 32 x 16 values a thread.
    """
    width = min(1 << (columns.bit_length() - 1), 32)
    height = min(1 << (max(-(-rows // 16), 1).bit_length() - 1), 512 // width)
    if width * height != 512:
        width = min(1 << (columns.bit_length() - 1), 512 // height)
    along = min(-(-rows // (height * 16)), 128)
    return -(-columns // width), 1 if along < 8 else along


def batch_norm_staging_bytes(values: int, wide: int, columns: int, rows: int) -> int:
    """`staging_data` of the channels last kernels: so many values of `wide` bytes a channel and
    block of rows; none for one block.
    """
    along = batch_norm_grid(rows, columns)[1]
    return values * wide * columns * along if along > 1 else 0


def batch_norm_semaphore_bytes(columns: int, rows: int) -> int:
    """`semaphores` of the channels last kernels: 4 bytes for each block of channels; none for one
    block of rows.
    """
    across, along = batch_norm_grid(rows, columns)
    return 4 * across if along > 1 else 0


def _channels_innermost(tensor: torch.Tensor) -> bool:
    """`batch_norm_choose_impl` (Normalization.cu): whether the kernels for channels last run."""
    if tensor.is_contiguous():
        return tensor.stride(1) == 1
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _take_staging(steps: KernelBuilder, x: torch.Tensor, values: int) -> None:
    columns = x.shape[1]
    rows = x.numel() // max(columns, 1)
    staging = steps.take(batch_norm_staging_bytes(values, accumulate_bytes(x.dtype), columns, rows))
    steps.give(steps.take(batch_norm_semaphore_bytes(columns, rows)), staging)


def _batch_norm(call: Call) -> Kernel | None:
    """`batch_norm_cuda` and `batch_norm_stats_channels_last_cuda_template` (Normalization.cu,
    .cuh): outputs, then what blocks share.
    """
    x = call.args[0]
    training = {"_batch_norm_with_update": True}.get(call.name)
    if training is None:
        training = next(a for a in call.args[3:] if isinstance(a, bool))
    if not training or not _channels_innermost(x):
        return None
    if (
        call.name == "_batch_norm_with_update"
        and x.ndim == 4
        and x.dtype != torch.bfloat16
        and call.args[1].dtype == torch.float32
    ):
        return None  # cuDNN's
    steps = KernelBuilder()
    steps.make(*range(len(call.outputs)))
    _take_staging(steps, x, 4)
    return steps.kernel


def _batch_norm_backward(call: Call) -> Kernel | None:
    """`batch_norm_backward_cuda` (Normalization.cu): with channels innermost two sums per channel,
    the inverse deviation in evaluation.
    """
    x, training, mask = call.args[1], call.args[7], call.args[9]
    if not (_channels_innermost(x) and _channels_innermost(call.args[0])):
        return None
    steps = KernelBuilder()
    wide = x.shape[1] * accumulate_bytes(x.dtype)
    takes = [steps.take(wide) for _ in range(2 if training else 3)]
    steps.make(*range(int(mask[0]), len(call.outputs)))
    _take_staging(steps, x, 2)
    if mask[0]:
        steps.make(0)
    steps.give(*reversed(takes))
    return steps.kernel


RULES: dict[str, Rule] = {
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_batch_norm_with_update": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "_softmax": _softmax,
    "_safe_softmax": _safe_softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
}
