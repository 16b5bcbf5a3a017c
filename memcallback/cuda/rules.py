"""Look up the rules of an operator; make a kernel rule replayable at another batch size.

A trace on fake tensors sees an operator's arguments and result. The temporaries of its CUDA kernel,
and the order in which it allocates its outputs, were measured operator by operator on the CUDA
build of PyTorch 2.11 and follow the source files that the rules name; `tests/recorded/kernels` has
the measurements. Scratch of CUB (sort, scan, unique) is approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cache, reduce
from typing import Any, NamedTuple

import torch

from memcallback.core.kernel import Kernel, KernelRule
from memcallback.core.tensors import dense_parts
from memcallback.core.torch_private import schema_of
from memcallback.cuda import outputs
from memcallback.cuda.convolution import rule as convolution
from memcallback.cuda.convolution.call import CudnnFlags
from memcallback.cuda.kernels import (
    attention,
    index,
    libraries,
    loss,
    matrix,
    misc,
    norm,
    pooling,
    reduction,
    sort,
)
from memcallback.cuda.op_call import Correction, OpCall, Rule
from memcallback.devices.catalogue import DeviceSpec

_KERNELS: dict[str, Rule] = {
    **attention.RULES,
    **convolution.RULES,
    **index.RULES,
    **loss.RULES,
    **matrix.RULES,
    **misc.RULES,
    **norm.RULES,
    **pooling.RULES,
    **reduction.RULES,
    **sort.RULES,
}
_CORRECTIONS: dict[str, Correction] = {**outputs.CORRECTIONS, **convolution.CORRECTIONS}


#: The namespaces of operators whose kernels are known: PyTorch's, and those of `libraries`.
_KNOWN = {
    "aten",
    "bucketing",
    "c10d",
    "c10d_functional",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "device_mesh",
    "_dtensor",
    "flex_lib",
    "fsdp",
    "inductor",
    "inductor_prims",
    "mkl",
    "mkldnn",
    "_native",
    "onednn",
    "prim",
    "prims",
    "profiler",
    "quantized",
    "_quantized",
    "rngprims",
    "sparse",
    "streams",
    "symm_mem",
    "torch_attn",
    *(name.partition("::")[0] for name in libraries.RULES),
}


class OperatorRules(NamedTuple):
    """The rules of one operator, None for those that it does not need.

    Attributes:
        kernel: Its temporaries, and the order of its outputs.
        correction: Its result on CUDA, from that of its fake kernel.
        replacement: Its result, where its fake kernel fails.
        flags: Reads the flags of torch that its kernel depends on.
    """

    kernel: Rule | None
    correction: Correction | None
    replacement: Callable[[OpCall], torch.Tensor | None] | None
    flags: Callable[[], Hashable] | None


@cache
def rules_of(op: Any) -> OperatorRules:
    """The rules of an operator."""
    whole_name = schema_of(op).name
    namespace, _, name = whole_name.partition("::")
    if namespace != "aten":
        return OperatorRules(libraries.RULES.get(whole_name), None, None, None)
    return OperatorRules(
        _KERNELS.get(name),
        _CORRECTIONS.get(name),
        outputs.REPLACEMENTS.get(name),
        CudnnFlags.now if name in convolution.RULES else None,
    )


def has_known_kernel(op: Any) -> bool:
    """Whether an operator is known to allocate what its rule says, or its outputs alone."""
    return op.namespace in _KNOWN


def corrected_result(call: OpCall) -> Any:
    """The result on CUDA; None where the fake kernel's result is right."""
    correction = rules_of(call.op).correction
    return None if correction is None else correction(call)


def result_without_fake(call: OpCall) -> torch.Tensor | None:
    """The result of an operator with a failing fake kernel; None to run the fake kernel."""
    replacement = rules_of(call.op).replacement
    return None if replacement is None else replacement(call)


def kernel_of(call: OpCall) -> Kernel | None:
    """The kernel of a call; None if it allocates its outputs in order, and nothing else."""
    rule = rules_of(call.op).kernel
    return None if rule is None else rule(call)


def kernel_rule(call: OpCall) -> KernelRule | None:
    """The kernel of a call as a function of its numbers; None for an operator without a rule."""
    rules = rules_of(call.op)
    if rules.kernel is None:
        return None
    numbers: list[int] = []
    packed = _pack((tuple(call.args), tuple(call.kwargs.items()), tuple(call.outputs)), numbers)
    flags = None if rules.flags is None else rules.flags()
    # By its name: an operator cannot be pickled.
    return KernelRule(_kernel_at, (str(call.op), packed, call.card, flags), tuple(numbers))


def _kernel_at(
    op_name: str, packed: Hashable, card: DeviceSpec, flags: Hashable, *numbers: int
) -> Kernel:
    args, kwargs, outputs = _unpack(packed, iter(numbers))
    return kernel_of(OpCall(_operator(op_name), args, dict(kwargs), card, outputs, flags)) or ()


@cache
def _operator(name: str) -> Any:
    """The operator of a name such as `aten.addmm.default`."""
    return reduce(getattr, name.split("."), torch.ops)


def _pack(value: Any, numbers: list[int]) -> Hashable:
    """Describe a value without its numbers, which are appended to a list."""
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
    """The value again, with meta tensors of the same shape, strides and dtype."""
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
