"""OpCall, one call of an operator, and KernelBuilder: what kernel rules are written with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from memcallback.core.allocation_trace import Fallback
from memcallback.core.kernel import AllocOutput, AllocTemp, FreeTemp, Kernel, OpenBlasHandles
from memcallback.core.tensors import dense_parts
from memcallback.core.torch_private import schema_of
from memcallback.core.types import Category
from memcallback.devices.catalogue import DeviceSpec


@dataclass(frozen=True)
class OpCall:
    """One call of an operator.

    Attributes:
        op: The operator, such as `torch.ops.aten.mm.default`.
        args: Its positional arguments, as they were passed.
        kwargs: Its keyword arguments, as they were passed.
        card: The card; None for a training on a CPU.
        result: What it returns; None before it has run.
        flags: The flags of torch that its kernel depends on, such as cuDNN's for a convolution.
    """

    op: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    card: DeviceSpec | None
    result: Any = None
    flags: Hashable = None

    def returning(self, result: Any) -> OpCall:
        """The same call with its result."""
        return OpCall(self.op, self.args, self.kwargs, self.card, result, self.flags)

    @property
    def operator(self) -> str:
        """The name with its namespace, such as `aten::mm`."""
        return str(schema_of(self.op).name)

    @property
    def name(self) -> str:
        """The name without namespace and overload, such as `mm`."""
        return self.operator.partition("::")[2]

    @property
    def device(self) -> DeviceSpec:
        """The card, for calls on CUDA."""
        assert self.card is not None
        return self.card

    @cached_property
    def arguments(self) -> list[Any]:
        """The arguments in the order of the schema, defaults filled in."""
        rest = _schema_of(self.op)[len(self.args) :]
        return [*self.args, *(self.kwargs.get(name, default) for name, default in rest)]

    @property
    def by_name(self) -> dict[str, Any]:
        """The arguments by their names in the schema, defaults filled in."""
        names = (name for name, _ in _schema_of(self.op))
        return dict(zip(names, self.arguments, strict=True))

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """The dense tensors among the arguments."""
        return tensors_of((*self.args, *self.kwargs.values()))

    @cached_property
    def outputs(self) -> list[torch.Tensor]:
        """The dense tensors in the result, in order."""
        return tensors_of(self.result)


@cache
def _schema_of(op: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in schema_of(op).arguments)


def tensors_of(values: object) -> list[torch.Tensor]:
    """List the dense tensors of an operator's arguments or result, in nested sequences too."""
    if isinstance(values, torch.Tensor):
        return [*dense_parts(values)]
    tensors: list[torch.Tensor] = []
    if isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, torch.Tensor):
                tensors.extend(dense_parts(value))
            elif isinstance(value, (tuple, list)):
                tensors.extend(tensors_of(value))
    return tensors


#: From a call to its kernel. None: it allocates its outputs in order, and nothing else.
Rule = Callable[[OpCall], Kernel | None]
#: From a call with its fake result to its result on CUDA; None where the fake result is right.
Correction = Callable[[OpCall], Any]


class KernelBuilder:
    """Collects the allocations of a kernel, in order."""

    def __init__(self) -> None:
        self._steps: list[AllocTemp | FreeTemp | AllocOutput | OpenBlasHandles] = []
        self._num_temps = 0

    def alloc(
        self,
        size_bytes: int,
        category: Category = Category.TEMPORARY,
        fallback: Fallback | None = None,
    ) -> int:
        """Allocate a temporary; return its number, for `free`."""
        self._steps.append(AllocTemp(size_bytes, category, fallback))
        self._num_temps += 1
        return self._num_temps - 1

    def alloc_copy(self, tensor: torch.Tensor | None) -> int | None:
        """Allocate a contiguous copy of a tensor that is not contiguous (`Tensor::contiguous`)."""
        return None if tensor is None or tensor.is_contiguous() else self.alloc(dense_bytes(tensor))

    def free(self, *temps: int | None) -> None:
        """Free temporaries in this order, ignoring None."""
        self._steps.extend(FreeTemp(index) for index in temps if index is not None)

    def output(self, *indices: int) -> None:
        """Allocate outputs in this order."""
        self._steps.extend(AllocOutput(index) for index in indices)

    def sized_output(self, index: int, size_bytes: int) -> None:
        """Allocate an output whose storage size does not follow from its shape."""
        self._steps.append(AllocOutput(index, size_bytes))

    def open_blas(self) -> None:
        """Multiply matrices, which opens cuBLAS's handles the first time."""
        if OpenBlasHandles() not in self._steps:
            self._steps.append(OpenBlasHandles())

    def build(self) -> Kernel:
        """Return all steps so far."""
        return tuple(self._steps)


def output_then_copy(call: OpCall) -> Kernel:
    """Allocate the output, then a contiguous copy of the first argument.

    `host_softmax` (SoftMax.cu), pads and samplers (ReflectionPad.cu, UpSampleBicubic2d.cu).
    """
    kernel = KernelBuilder()
    kernel.output(0)
    kernel.free(kernel.alloc_copy(call.arguments[0]))
    return kernel.build()


def dense_bytes(tensor: torch.Tensor) -> int:
    """Size of a contiguous copy of a tensor."""
    return tensor.numel() * tensor.element_size()


def is_dense_in_any_order(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their extent, each once (`is_non_overlapping_and_dense`)."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def is_low(dtype: torch.dtype) -> bool:
    """Whether CUDA computes this dtype in float32."""
    return dtype in (torch.float16, torch.bfloat16)


def accumulate_bytes(dtype: torch.dtype) -> int:
    """Size of one value of `at::acc_type<dtype, is_cuda=true>`."""
    if is_low(dtype):
        return 4
    return dtype.itemsize if dtype.is_floating_point or dtype.is_complex else 8
