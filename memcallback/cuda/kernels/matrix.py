"""Kernels of matrix products, and which of them need workspaces of cuBLAS and cuBLASLt."""

from __future__ import annotations

import math

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.types import Category
from memcallback.cuda.op_call import KernelBuilder, OpCall, Rule, dense_bytes

#: Matrix product -> the position of its first factor; the second follows.
_FACTORS = {
    "mm": 0,
    "bmm": 0,
    "addmm": 1,
    "baddbmm": 1,
    "addbmm": 1,
    "_addmm_activation": 1,
    "mv": 0,
    "addmv": 1,
    "dot": 0,
    "vdot": 0,
    "_trilinear": 0,
}


def uses_cublas(call: OpCall) -> bool:
    """Whether a call needs cuBLAS's workspace (`DeviceSpec.cublas_workspace_bytes`)."""
    first = _FACTORS.get(call.name)
    return first is not None and all(t.numel() > 0 for t in call.arguments[first : first + 2])


def uses_cublaslt(call: OpCall) -> bool:
    """Whether cuBLASLt computes a call, which needs its workspace after cuBLAS's.

    Inductor has it write into outputs with padded rows, which cuBLASLt is not asked for.
    """
    if uses_cublaslt_alone(call):
        return True
    if call.operator == "bitsandbytes::gemm_4bit":  # it calls `linear`
        return call.by_name["bias"] is not None
    if call.name not in ("addmm", "_addmm_activation") or not uses_cublas(call):
        return False
    if not all(output.is_contiguous() for output in call.outputs):
        return False
    bias, _, factor, beta = call.arguments[:4]
    is_row = bias.ndim == 1 or (bias.ndim == 2 and bias.shape[0] == 1)
    if not is_row or not bias.is_contiguous() or beta != 1 or bias.dtype.is_complex:
        return False
    return bool(bias.shape[-1] == factor.shape[1] and min(factor.shape) > 1)


def uses_cublaslt_alone(call: OpCall) -> bool:
    """Whether a product needs no workspace of cuBLAS; on some cards of AMD."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return call.device.prefers_cublaslt and uses_cublas(call) and call.outputs[0].dtype in dtypes


def _product(call: OpCall) -> Kernel | None:
    """`prepare_matrix_for_cublas` (Blas.cpp): the output, then copies of strided factors.

    A factor is copied if neither its rows nor its columns are contiguous. In an old PyTorch
    cuBLASLt's workspace follows (`gemm_and_bias` in CUDABlas.cpp).
    """
    first = _FACTORS[call.name]
    factors = call.arguments[first : first + 2]
    has_workspace = uses_cublaslt(call) and call.device.cublaslt_workspace == "each call"
    if not all(t.numel() for t in factors):
        return None
    if all(_usable(t) for t in factors) and not has_workspace:
        return None
    kernel = KernelBuilder()
    kernel.output(0)
    copies = [None if _usable(t) else kernel.alloc(dense_bytes(t)) for t in factors]
    if has_workspace:
        workspace = kernel.alloc(call.device.cublaslt_workspace_bytes, Category.WORKSPACE)
        kernel.open_blas()
        kernel.free(workspace)
    kernel.free(*reversed(copies))
    return kernel.build()


def _usable(matrix: torch.Tensor) -> bool:
    """Whether cuBLAS can read the last two dimensions as they are."""
    if matrix.ndim < 2:
        return True
    (rows, columns), (along, across) = matrix.shape[-2:], matrix.stride()[-2:]
    return (across == 1 and along >= max(1, columns)) or (along == 1 and across >= max(1, rows))


def _trilinear(call: OpCall) -> Kernel:
    """`_trilinear` (Linear.cpp): two products for each index of one dimension.

    That of the first two factors, then that with the third.
    """
    factors, expanded, (summed, unrolled) = (
        call.arguments[:3],
        call.arguments[3:6],
        call.arguments[6:8],
    )
    num_dims = factors[0].ndim + len(expanded[0])
    sizes = [1] * num_dims
    for factor, without in zip(factors, expanded, strict=True):
        for dim, size in zip(
            (dim for dim in range(num_dims) if dim not in without), factor.shape, strict=True
        ):
            sizes[dim] = size
    num_unrolled = sizes[unrolled]
    sizes[unrolled] = 1
    # What the third factor lacks is summed in the first product.
    first, second, third = expanded
    of_first = {
        dim
        for dim in range(num_dims)
        if not (dim in first and dim in second) and not (dim in summed and dim in third)
    }
    of_two = math.prod(size for dim, size in enumerate(sizes) if dim in of_first)
    of_three = math.prod(size for dim, size in enumerate(sizes) if dim not in summed)
    kernel = KernelBuilder()
    kernel.output(0)
    for _ in range(num_unrolled if all(factor.numel() for factor in factors) else 0):
        kernel.free(
            *[
                kernel.alloc(number * call.outputs[0].element_size())
                for number in (of_two, of_three)
            ]
        )
    return kernel.build()


RULES: dict[str, Rule] = {
    "_trilinear": _trilinear,
    "mm": _product,
    "addmm": _product,
    "bmm": _product,
    "baddbmm": _product,
    "_addmm_activation": _product,
}
