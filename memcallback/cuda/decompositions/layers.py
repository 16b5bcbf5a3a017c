"""Simple layers, decomposed as on CUDA: dropout, linear, softmax, norms, one_hot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memcallback.core.torch_private import CompositeImplicitAutograd, suggest_memory_format

_aten = torch.ops.aten
Composite = Callable[..., Any]


def own_decomposition(name: str) -> Composite:
    """PyTorch's own decomposition of a composite operator, in C++.

    `OpOverload.decompose` prefers Python decompositions for compilers, which draw other random
    numbers.
    """
    operator, _, overload = name.partition(".")
    own = getattr(getattr(_aten, operator), overload or "default")
    return lambda *args, **kwargs: own._op_dk(CompositeImplicitAutograd, *args, **kwargs)


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that keeps a mask of one byte per element.

    `dropout` in ATen/native/Dropout.cpp (`is_fused_kernel_acceptable`).
    """
    if train and 0 < p < 1 and input.numel() > 0:
        output: torch.Tensor = _aten.native_dropout(input, p, train)[0]
        return output
    kept: torch.Tensor = own_decomposition("dropout")(input, p, train)
    return kept


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer: `linear` in ATen/native/Linear.cpp.

    It adds the bias out of place for tensor subclasses, such as fakes.
    """
    if bias is None or input.dim() <= 2 or input.is_contiguous() or bias.dim() != 1:
        output: torch.Tensor = own_decomposition("linear")(input, weight, bias)
        return output
    return _aten.matmul(input, weight.t()).add_(bias)  # type: ignore[no-any-return]


def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """One-hot vectors, scattered: `one_hot` in ATen/native/Onehot.cpp, which differs for fakes."""
    if num_classes < 1 or self.numel() == 0:
        unknown: torch.Tensor = own_decomposition("one_hot")(self, num_classes)
        return unknown
    return torch.zeros(*self.shape, num_classes, dtype=self.dtype, device=self.device).scatter_(
        -1, self.unsqueeze(-1), 1
    )


def softmax(name: str, function: Any) -> Composite:
    """`softmax` and `log_softmax` (SoftMax.cpp): from float16 to float32 without a copy."""

    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if input.dtype == torch.float16 and dtype == torch.float32:
            return function(input, dim, True)
        return own_decomposition(name)(input, dim, dtype)

    return kernel


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """RMSNorm in one kernel, which saves one number per row.

    `rms_norm_symint` in ATen/native/layer_norm.cpp, since PyTorch 2.9.
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
        composed: torch.Tensor = own_decomposition("rms_norm")(input, normalized_shape, weight, eps)
        return composed
    apply: Callable[..., torch.Tensor] = _FusedRmsNorm.apply
    return apply(input, weight, len(normalized_shape))


class _FusedRmsNorm(torch.autograd.Function):
    """The allocations of `_fused_rms_norm` and its backward.

    PyTorch's CPU wheel decomposes both above autograd.
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
        # An expanded gradient (that of a sum) is copied, as by `_layer_norm_backward`.
        grad.contiguous()
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
) -> Any:
    """Batch norm, with cuDNN if possible.

    `_select_batch_norm_backend` in ATen/native/Normalization.cpp.
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
        return own_decomposition("_batch_norm_impl_index")(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )
    layout = suggest_memory_format(input)
    dense = input.contiguous(memory_format=layout)
    output, mean, inverse, reserve = _aten.cudnn_batch_norm(
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
) -> torch.Tensor:
    """Group norm of a contiguous tensor: `group_norm` in ATen/native/group_norm.cpp.

    Only its CPU version keeps channels_last.
    """
    normalized: torch.Tensor = own_decomposition("group_norm")(
        input.contiguous(), num_groups, weight, bias, eps, cudnn_enabled
    )
    return normalized
