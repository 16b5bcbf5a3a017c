"""The calls of CUDA operators as rules of whole numbers, so that they can be asked again at another batch size without a trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memcallback.cuda_convolution import convolution_kernel
from memcallback.cuda_kernels import has_rule, kernel
from memcallback.devices import DeviceSpec
from memcallback.kernels import Kernel, KernelRule
from memcallback.tensor_parts import dense_parts

_aten = torch.ops.aten
CONVOLUTIONS = frozenset({_aten.convolution.default, _aten._convolution.default, _aten.convolution_backward.default})


def kernel_rule(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Any], device: DeviceSpec) -> KernelRule | None:
    """What a CUDA operator does with the allocator, as a rule.

    Args:
        op: The operator, as a dispatch mode below autograd sees it.
        args: Its arguments; of tensors shapes, strides and dtypes are kept.
        kwargs: Its named arguments.
        outputs: What it returns, in order.
        device: The card.

    Returns:
        The rule; None for an operator that makes its outputs in order and takes nothing at any size.
    """
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
        return torch.sparse_coo_tensor(indices, values, shape, device="meta", check_invariants=False)
    if kind == "number":
        return next(numbers)
    if kind == "sequence":
        return tuple(_unpack(item, numbers) for item in rest[0])
    return rest[0]
