"""What the CUDA kernels of operators take from the allocator, and where their outputs are not those of a CPU's fake kernel.

A trace on fake tensors sees an operator's arguments and outputs. What its CUDA kernel takes besides, and in which order it
makes its outputs, was measured operator by operator on the CUDA build of PyTorch 2.11 and follows the source files that the rules
name; `tests/recorded/kernels` has the measurements. Scratch of CUB (sort, scan, unique) is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memcallback import (
    cuda_kernels_attention,
    cuda_kernels_index,
    cuda_kernels_loss,
    cuda_kernels_matrix,
    cuda_kernels_norm,
    cuda_kernels_other,
    cuda_kernels_reductions,
    cuda_kernels_sort,
    cuda_kernels_sparse,
)
from memcallback.cuda_kernels_matrix import uses_cublas, uses_cublaslt
from memcallback.cuda_kernels_outputs import CORRECTIONS, Correction
from memcallback.cuda_kernels_plan import Call, Rule
from memcallback.devices import DeviceSpec
from memcallback.kernels import Kernel

__all__ = ["CUBLASLT_WORKSPACE_BYTES", "corrected_outputs", "has_rule", "kernel", "uses_cublas", "uses_cublaslt"]

#: What cuBLASLt keeps for each handle and stream: measured on the CUDA build of PyTorch 2.11 for compute capability 7.5, 8.0 and 9.0.
CUBLASLT_WORKSPACE_BYTES = 1 << 20

_RULES: dict[str, Rule] = {
    **cuda_kernels_attention.RULES,
    **cuda_kernels_index.RULES,
    **cuda_kernels_loss.RULES,
    **cuda_kernels_matrix.RULES,
    **cuda_kernels_norm.RULES,
    **cuda_kernels_other.RULES,
    **cuda_kernels_reductions.RULES,
    **cuda_kernels_sort.RULES,
    **cuda_kernels_sparse.RULES,
}
_known: dict[torch._ops.OpOverload, tuple[str, Rule | None, Correction | None]] = {}


def kernel(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[torch.Tensor],
    device: DeviceSpec,
) -> Kernel | None:
    """What an operator does with the allocator on a CUDA device.

    Args:
        op: The operator, as a dispatch mode below autograd sees it.
        args: Its arguments; tensors may be fakes, on any device.
        kwargs: Its named arguments.
        outputs: The tensors that it returns, in order, corrected by `corrected_outputs`.
        device: The card.

    Returns:
        Its takes, gives and makes; None if it makes its outputs in order and takes nothing. A take may be of 0 bytes.
    """
    name, rule, _ = _known.get(op) or _look_up(op)
    return None if rule is None else rule(Call(name, _in_order(op, args, kwargs), outputs, device))


def has_rule(op: torch._ops.OpOverload) -> bool:
    """Whether `kernel` may say something of an operator."""
    return (_known.get(op) or _look_up(op))[1] is not None


def corrected_outputs(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> Any:
    """What an operator returns on CUDA, where a CPU's fake kernel returns something else.

    Args:
        op: The operator.
        args: Its arguments.
        kwargs: Its named arguments.
        outputs: What the fake kernel returned: a tensor, or a tuple of tensors and None.

    Returns:
        The same structure with the dtypes, shapes, strides and storage sizes of CUDA; None where `outputs` are right.
    """
    correction = (_known.get(op) or _look_up(op))[2]
    return None if correction is None else correction(_in_order(op, args, kwargs), outputs)


def _look_up(op: torch._ops.OpOverload) -> tuple[str, Rule | None, Correction | None]:
    namespace, _, name = op._schema.name.partition("::")
    ours = namespace == "aten"
    found = _known[op] = (name, _RULES.get(name) if ours else None, CORRECTIONS.get(name) if ours else None)
    return found


def _in_order(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments in the order of the schema, defaults filled in."""
    ordered = list(args)
    ordered.extend(kwargs.get(argument.name, argument.default_value) for argument in op._schema.arguments[len(ordered) :])
    return ordered
