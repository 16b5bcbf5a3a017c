"""Outputs of the operators of `torch.nn.SyncBatchNorm`, which PyTorch has only for CUDA.

All are in ATen/native/cuda/Normalization.cu and Normalization.cuh. What they allocate besides is in
`cuda/kernels/norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memcallback.core.torch_private import suggest_memory_format
from memcallback.cuda.kernels.norm import has_channels_last_kernels
from memcallback.cuda.op_call import is_low


def _stats(input: Any, eps: float) -> Any:
    """Mean and inverse deviation of each channel (`batch_norm_stats_cuda`)."""
    wide = torch.float32 if is_low(input.dtype) else input.dtype
    return tuple(input.new_empty(input.shape[1], dtype=wide) for _ in range(2))


def _gather_stats(input: Any, mean: Any, *args: Any) -> Any:
    """The same of all ranks, of a row of each (`batch_norm_gather_stats_cuda_template`)."""
    wide = torch.float32 if is_low(mean.dtype) else mean.dtype
    return tuple(mean.new_empty(mean.shape[1], dtype=wide) for _ in range(2))


def _elemt(input: Any, *args: Any) -> Any:
    """The normalized input (`batch_norm_elemt_cuda`)."""
    return torch.empty_like(input)


def _backward_reduce(
    grad_out: Any, input: Any, mean: Any, invstd: Any, weight: Any, *needs: bool
) -> Any:
    """Two sums and the gradients of weight and bias, of each channel.

    `batch_norm_backward_reduce_cuda_channels_last_template` asks not which are needed.
    """
    channels = input.shape[1]
    if has_channels_last_kernels(grad_out) and has_channels_last_kernels(input):
        of_weight = mean.new_empty(0) if weight is None else weight
        sizes = [0 if weight is None else channels] * 2
        return (
            *(mean.new_empty(channels) for _ in range(2)),
            *(of_weight.new_empty(size) for size in sizes),
        )
    input_g, weight_g, bias_g = needs
    return (
        *(mean.new_empty(mean.shape) if input_g else None for _ in range(2)),
        *(weight.new_empty(channels) if is_needed else None for is_needed in (weight_g, bias_g)),
    )


def _backward_elemt(grad_out: Any, input: Any, *args: Any) -> Any:
    """The gradient of the input (`batch_norm_backward_elemt_cuda`)."""
    if has_channels_last_kernels(input) and has_channels_last_kernels(grad_out):
        return torch.empty_like(input, memory_format=suggest_memory_format(input))
    return torch.empty_like(input, memory_format=torch.contiguous_format)


#: Name -> its outputs.
SHAPES: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats": _gather_stats,
    "batch_norm_gather_stats_with_counts": _gather_stats,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}
