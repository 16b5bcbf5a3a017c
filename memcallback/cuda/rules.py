"""Look up the allocation rule of an operator; make it replayable at another batch size.

A trace on fake tensors sees an operator's arguments and outputs. What its CUDA kernel takes
besides, and in which order it makes its outputs, was measured operator by operator on the CUDA
build of PyTorch 2.11 and follows the source files that the rules name; `tests/recorded/kernels` has
the measurements. Scratch of CUB (sort, scan, unique) is approximate.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memcallback.core.kernel import Kernel, KernelRule
from memcallback.core.tensors import dense_parts
from memcallback.cuda.convolution.rule import convolution_kernel
from memcallback.cuda.kernels import attention as cuda_kernels_attention
from memcallback.cuda.kernels import index as cuda_kernels_index
from memcallback.cuda.kernels import loss as cuda_kernels_loss
from memcallback.cuda.kernels import matrix as cuda_kernels_matrix
from memcallback.cuda.kernels import misc as cuda_kernels_other
from memcallback.cuda.kernels import norm as cuda_kernels_norm
from memcallback.cuda.kernels import reduction as cuda_kernels_reductions
from memcallback.cuda.kernels import sort as cuda_kernels_sort
from memcallback.cuda.kernels.call import Call, Rule
from memcallback.cuda.outputs import CORRECTIONS, Correction
from memcallback.devices.catalogue import DeviceSpec

#: What cuBLASLt keeps for each handle and stream: measured on the CUDA build of PyTorch 2.11 for
#: compute capability 7.5, 8.0 and 9.0.
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
    **cuda_kernels_index.SPARSE_RULES,
}
_known: dict[torch._ops.OpOverload, tuple[str, Rule | None, Correction | None]] = {}


def kernel(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[torch.Tensor],
    device: DeviceSpec,
) -> Kernel | None:
    """What an operator does with the allocator on a CUDA device."""
    name, rule, _ = _known.get(op) or _look_up(op)
    return None if rule is None else rule(Call(name, _in_order(op, args, kwargs), outputs, device))


def has_rule(op: torch._ops.OpOverload) -> bool:
    """Whether `kernel` may say something of an operator."""
    return (_known.get(op) or _look_up(op))[1] is not None


def corrected_outputs(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any
) -> Any:
    """What an operator returns on CUDA, where a CPU's fake kernel returns something else."""
    correction = (_known.get(op) or _look_up(op))[2]
    return None if correction is None else correction(_in_order(op, args, kwargs), outputs)


def _look_up(op: torch._ops.OpOverload) -> tuple[str, Rule | None, Correction | None]:
    namespace, _, name = op._schema.name.partition("::")
    ours = namespace == "aten"
    found = _known[op] = (
        name,
        _RULES.get(name) if ours else None,
        CORRECTIONS.get(name) if ours else None,
    )
    return found


def _in_order(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """The arguments in the order of the schema, defaults filled in."""
    ordered = list(args)
    ordered.extend(
        kwargs.get(argument.name, argument.default_value)
        for argument in op._schema.arguments[len(ordered) :]
    )
    return ordered


_aten = torch.ops.aten
CONVOLUTIONS = frozenset(
    {_aten.convolution.default, _aten._convolution.default, _aten.convolution_backward.default}
)


def kernel_rule(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Any],
    device: DeviceSpec,
) -> KernelRule | None:
    """What a CUDA operator does with the allocator, as a rule."""
    if op not in CONVOLUTIONS and not has_rule(op):
        return None
    numbers: list[int] = []
    packed = _pack((tuple(args), tuple(kwargs.items()), tuple(outputs)), numbers)
    return KernelRule(_kernel_of, (op, packed, device), tuple(numbers))


def _kernel_of(op: Any, packed: Hashable, device: DeviceSpec, *numbers: int) -> Kernel:
    args, kwargs, outputs = _unpack(packed, iter(numbers))
    taken_by = convolution_kernel if op in CONVOLUTIONS else kernel
    return taken_by(op, args, dict(kwargs), outputs, device) or ()


def _pack(value: Any, numbers: list[int]) -> Hashable:
    """A value without its numbers, which are appended to a list."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            return "sparse", _pack((*dense_parts(value), tuple(value.shape)), numbers)
        numbers.extend((*value.shape, *value.stride()))
        return "tensor", value.dtype, value.dim()
    if isinstance(value, int) and not isinstance(value, bool):
        numbers.append(value)
        return ("number",)
    if isinstance(value, (tuple, list)):
        return "sequence", tuple(_pack(item, numbers) for item in value)
    return "value", value


def _unpack(packed: Any, numbers: Iterator[int]) -> Any:
    """The value again, with tensors of the same shape, strides and dtype."""
    kind, *rest = packed
    if kind == "tensor":
        dtype, num_dims = rest
        shape, strides = ([next(numbers) for _ in range(num_dims)] for _ in range(2))
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if kind == "sparse":
        indices, values, shape = _unpack(rest[0], numbers)
        return torch.sparse_coo_tensor(
            indices, values, shape, device="meta", check_invariants=False
        )
    if kind == "number":
        return next(numbers)
    if kind == "sequence":
        return tuple(_unpack(item, numbers) for item in rest[0])
    return rest[0]
