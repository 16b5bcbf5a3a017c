"""RMSNorm, batch norm and group norm, decomposed as on CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    own: Callable[..., Any],
) -> torch.Tensor:
    """RMSNorm in one kernel, which saves one number per row: `rms_norm_symint` in
    ATen/native/layer_norm.cpp, since PyTorch 2.9.
    """
    channels_last = any(
        input.dim() == dim
        and input.is_contiguous(memory_format=layout)
        and not input.is_contiguous()
        for dim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    if (
        channels_last
        or (weight is not None and weight.dtype != input.dtype)
        or not input.is_floating_point()
    ):
        composed: torch.Tensor = own(input, normalized_shape, weight, eps)
        return composed
    output: torch.Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return output


class _FusedRmsNorm(torch.autograd.Function):
    """The allocations of `_fused_rms_norm` and its backward, which PyTorch's CPU wheel decomposes
    above autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, num_dims: int
    ) -> torch.Tensor:
        rows = math.prod(input.shape[:-num_dims])
        # _fused_rms_norm_cuda in ATen/native/cuda/layer_norm_kernel.cu
        input = input.contiguous()
        output = torch.empty_like(input)
        scale = input.new_empty(
            rows, dtype=torch.float64 if input.dtype == torch.float64 else torch.float32
        )
        ctx.save_for_backward(input, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        grad_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[1] else None
        )
        return grad_input, grad_weight, None


def batch_norm_impl_index(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    *,
    own: Callable[..., Any],
) -> Any:
    """Batch norm with cuDNN if possible: `_select_batch_norm_backend` in
    ATen/native/Normalization.cpp.
    """
    running = (running_mean is not None) + (running_var is not None)
    usable = (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and input.dtype != torch.bfloat16
        and weight.dtype != torch.bfloat16
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and (running == 2 or (running == 0 and training))
        and input.dim() >= 3
        and input.numel() > 0
        and input.shape[0] <= (880801 if training else 65535)
        and eps >= 1e-5
    )
    if not usable:
        return own(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )
    layout = torch._prims_common.suggest_memory_format(input)
    dense = input.contiguous(memory_format=layout)
    output, mean, inverse, reserve = aten.cudnn_batch_norm(
        dense, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return output, mean, inverse, reserve, 1


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    own: Callable[..., Any],
) -> torch.Tensor:
    """Group norm of a contiguous tensor: `group_norm` in ATen/native/group_norm.cpp, which keeps
    channels_last only on a CPU.
    """
    normalized: torch.Tensor = own(input.contiguous(), num_groups, weight, bias, eps, cudnn_enabled)
    return normalized
