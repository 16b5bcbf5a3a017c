"""A Triton kernel as a program writes it, for a compiled step; importing it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(inputs: Any, outputs: Any, factor: Any, num: Any, BLOCK: tl.constexpr) -> None:
    """Multiply each number by a factor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(outputs + at, tl.load(inputs + at, at < num) * factor, at < num)


def scaled(inputs: torch.Tensor, factor: float) -> torch.Tensor:
    """Launch the kernel."""
    outputs, num = torch.empty_like(inputs), inputs.numel()
    scale_kernel[(triton.cdiv(num, 256),)](inputs, outputs, factor, num, BLOCK=256)
    return outputs


class Scale(torch.autograd.Function):
    """The kernel, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, factor: float) -> torch.Tensor:
        """Scale the inputs."""
        ctx.factor = factor
        return scaled(inputs, factor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Scale the gradient."""
        return scaled(gradients[0].contiguous(), ctx.factor), None


def scale(inputs: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply each number, with the kernel's own backward pass."""
    operator: Any = Scale
    outputs: torch.Tensor = operator.apply(inputs, factor)
    return outputs
