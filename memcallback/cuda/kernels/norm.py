"""Kernels of normalization and softmax."""

from __future__ import annotations

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.units import round_down_to_power_of_2
from memcallback.cuda.kernels.reduction import Reducer, add_reduction
from memcallback.cuda.op_call import (
    KernelBuilder,
    OpCall,
    Rule,
    accumulate_bytes,
    dense_bytes,
    output_then_copy,
)


def _layer_norm(call: OpCall) -> Kernel:
    """`layer_norm_cuda` (layer_norm_kernel.cu): contiguous copies of the inputs, then the outputs.

    The inputs are input, weight and bias.
    """
    kernel = KernelBuilder()
    copies = [
        kernel.alloc_copy(t)
        for t in (
            call.arguments[0],
            call.arguments[2],
            call.arguments[3] if call.name == "native_layer_norm" else None,
        )
    ]
    kernel.output(*range(len(call.outputs)))
    kernel.free(*reversed(copies))
    return kernel.build()


#: The blocks of the first of two passes, at most (`max_grid_size` there).
_MAX_BLOCKS = 64 * 1024 // 2


def _layer_norm_backward(call: OpCall) -> Kernel:
    """`layer_norm_backward_cuda` and `LaunchGammaBetaBackwardCUDAKernel` (layer_norm_kernel.cu).

    With more than 64 Ki short rows, the gradients of weight and bias are summed in two passes:
    partial sums of 32 rows or more, then `sum(0)` of these, whose result replaces the first output.
    """
    grad, x, rms = call.arguments[0], call.arguments[1], call.name == "_fused_rms_norm_backward"
    normalized, weight = call.arguments[2], call.arguments[4] if rms else call.arguments[5]
    mask = call.arguments[-1]
    kernel = KernelBuilder()
    copies = [kernel.alloc_copy(t) for t in (x, weight)]
    columns = 1
    for size in normalized:
        columns *= size
    rows = x.numel() // max(columns, 1)
    of_weight = list(range(int(mask[0]), len(call.outputs)))
    two_passes = (
        of_weight and rows > 64 * 1024 and columns // 32 < call.device.num_multiprocessors // 2
    )
    if not two_passes:
        kernel.output(*range(len(call.outputs)))
        kernel.free(kernel.alloc_copy(grad), *reversed(copies))
        return kernel.build()
    if mask[0]:
        kernel.output(0)
    itemsize = call.outputs[of_weight[0]].element_size()
    first = [kernel.alloc(columns * itemsize) for _ in of_weight]
    parts = min(_MAX_BLOCKS // -(-columns // 32), -(-rows // 32))
    partial = [kernel.alloc(parts * columns * itemsize) for _ in of_weight]
    for output, old in zip(of_weight, first, strict=True):
        kernel.output(output)
        reducer = Reducer(accumulate_bytes(call.outputs[output].dtype))
        add_reduction(
            kernel, call.device, reducer, itemsize, (parts, columns), (columns, 1), (True, False)
        )
        kernel.free(old)
    kernel.free(*reversed(partial), *reversed(copies))
    return kernel.build()


def _group_norm(call: OpCall) -> Kernel:
    """`GroupNormKernelImplInternal` (group_norm_kernel.cu): scale and shift per sample and channel.

    Both are in the accumulation type.
    """
    x, weight, bias, n, channels, width = call.arguments[:6]
    kernel = KernelBuilder()
    kernel.output(0, 1, 2)
    if width != 1 and (weight is not None or bias is not None):
        scale = kernel.alloc(n * channels * accumulate_bytes(x.dtype))
        shift = kernel.alloc(n * channels * accumulate_bytes(x.dtype))
        kernel.free(shift, scale)
    return kernel.build()


def _group_norm_backward(call: OpCall) -> Kernel:
    """`GroupNormBackwardKernelImplInternal` (group_norm_kernel.cu).

    Two sums per sample and channel, three factors for the input gradient.
    """
    _, x, _, _, weight, n, channels, width, groups, mask = call.arguments
    wide = accumulate_bytes(x.dtype)
    kernel = KernelBuilder()
    kernel.output(*range(len(call.outputs)))
    sums = [kernel.alloc(n * channels * wide) for _ in range(2)]
    if mask[0]:
        second, third = kernel.alloc(n * groups * wide), kernel.alloc(n * groups * wide)
        first = kernel.alloc(n * channels * wide) if weight is not None and width != 1 else None
        kernel.free(third, second, first)
    kernel.free(*reversed(sums))
    return kernel.build()


def _safe_softmax(call: OpCall) -> Kernel:
    """`_safe_softmax` (attention.cpp): the softmax, a mask, which rows are fully masked, a zero."""
    x, output = call.arguments[0], call.outputs[0]
    kernel = KernelBuilder()
    kernel.output(0)
    kernel.free(kernel.alloc_copy(x))
    masked = kernel.alloc(x.numel())
    rows = kernel.alloc(x.numel() // x.shape[call.arguments[1]] if x.numel() else 0)
    zero = kernel.alloc(output.element_size())
    kernel.free(zero, rows, masked)
    return kernel.build()


def _softmax_backward(call: OpCall) -> Kernel:
    """`softmax_backward_cuda_out` (SoftMax.cu).

    The output, gradient * output, contiguous copies of both.
    """
    grad, y = call.arguments[:2]
    kernel = KernelBuilder()
    kernel.output(0)
    product = (
        kernel.alloc(dense_bytes(torch.empty_like(grad, device="meta")))
        if call.name == "_softmax_backward_data"
        else None
    )
    copies = [kernel.alloc_copy(t) for t in (grad, y)]
    kernel.free(*reversed(copies), product)
    return kernel.build()


def batch_norm_grid(rows: int, columns: int) -> tuple[int, int]:
    """Blocks over channels and rows, in tiles of 32 x 16 values a thread.

    `flexible_launch_configs` with `coop_flag` (Normalization.cuh).
    """
    width = min(round_down_to_power_of_2(columns), 32)
    height = min(round_down_to_power_of_2(-(-rows // 16)), 512 // width)
    if width * height != 512:
        width = min(round_down_to_power_of_2(columns), 512 // height)
    along = min(-(-rows // (height * 16)), 128)
    return -(-columns // width), 1 if along < 8 else along


def batch_norm_staging_bytes(values: int, wide: int, columns: int, rows: int) -> int:
    """`staging_data` of the channels last kernels; none for one block of rows.

    `values` numbers of `wide` bytes per channel and block of rows.
    """
    along = batch_norm_grid(rows, columns)[1]
    return values * wide * columns * along if along > 1 else 0


def batch_norm_semaphore_bytes(columns: int, rows: int) -> int:
    """`semaphores` of the channels last kernels: 4 bytes per block of channels.

    None for one block of rows.
    """
    across, along = batch_norm_grid(rows, columns)
    return 4 * across if along > 1 else 0


def _channels_innermost(tensor: torch.Tensor) -> bool:
    """`batch_norm_choose_impl` (Normalization.cu): whether the kernels for channels last run."""
    if tensor.is_contiguous():
        return tensor.stride(1) == 1
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def has_channels_last_kernels(tensor: torch.Tensor) -> bool:
    """`batch_norm_use_channels_last_kernels` (Normalization.cu)."""
    return (
        tensor.is_contiguous(memory_format=torch.channels_last)
        if tensor.ndim == 4
        else tensor.ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    ) or (tensor.is_contiguous() and tensor.stride(1) == 1)


def _add_staging(kernel: KernelBuilder, x: torch.Tensor, values: int) -> None:
    columns = x.shape[1]
    rows = x.numel() // max(columns, 1)
    staging = kernel.alloc(
        batch_norm_staging_bytes(values, accumulate_bytes(x.dtype), columns, rows)
    )
    kernel.free(kernel.alloc(batch_norm_semaphore_bytes(columns, rows)), staging)


def _batch_norm(call: OpCall) -> Kernel | None:
    """The outputs, then staging data and semaphores.

    `batch_norm_cuda` and `batch_norm_stats_channels_last_cuda_template` (Normalization.cu, .cuh).
    """
    x = call.arguments[0]
    training = {"_batch_norm_with_update": True}.get(call.name)
    if training is None:
        training = next(a for a in call.arguments[3:] if isinstance(a, bool))
    if not training or not _channels_innermost(x):
        return None
    if (
        call.name == "_batch_norm_with_update"
        and x.ndim == 4
        and x.dtype != torch.bfloat16
        and call.arguments[1].dtype == torch.float32
    ):
        return None  # cuDNN's
    kernel = KernelBuilder()
    kernel.output(*range(len(call.outputs)))
    _add_staging(kernel, x, 4)
    return kernel.build()


def _batch_norm_backward(call: OpCall) -> Kernel | None:
    """`batch_norm_backward_cuda` (Normalization.cu), channels innermost: two sums per channel.

    In evaluation also the inverse deviation.
    """
    x, training, mask = call.arguments[1], call.arguments[7], call.arguments[9]
    if not (_channels_innermost(x) and _channels_innermost(call.arguments[0])):
        return None
    kernel = KernelBuilder()
    wide = x.shape[1] * accumulate_bytes(x.dtype)
    temps = [kernel.alloc(wide) for _ in range(2 if training else 3)]
    kernel.output(*range(int(mask[0]), len(call.outputs)))
    _add_staging(kernel, x, 2)
    if mask[0]:
        kernel.output(0)
    kernel.free(*reversed(temps))
    return kernel.build()


def _batch_norm_sums(call: OpCall) -> Kernel | None:
    """The outputs of a part of SyncBatchNorm that adds up channels, then what it adds up with.

    `batch_norm_stats_channels_last_cuda_template`,
    `batch_norm_backward_reduce_cuda_channels_last_template` (Normalization.cuh).
    """
    is_backward = call.name == "batch_norm_backward_reduce"
    inputs = call.arguments[: 2 if is_backward else 1]
    if not all(map(has_channels_last_kernels, inputs)):
        return None
    kernel = KernelBuilder()
    kernel.output(*range(len(call.outputs)))
    _add_staging(kernel, inputs[-1], 2 if is_backward else 4)
    return kernel.build()


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
    "batch_norm_stats": _batch_norm_sums,
    "batch_norm_backward_reduce": _batch_norm_sums,
    "_softmax": output_then_copy,
    "_safe_softmax": _safe_softmax,
    "_log_softmax": output_then_copy,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
}
