"""Call and KernelBuilder: what rules are written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memcallback.core.kernel import AllocOutput, AllocTemp, FreeTemp, Kernel
from memcallback.core.types import Category
from memcallback.devices.catalogue import DeviceSpec


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator.

    Attributes:
        name: Of the operator, without namespace and overload, such as `native_layer_norm`.
        args: Its arguments in the order of its schema, defaults filled in.
        outputs: The tensors that it returns, in order.
        device: The card.
    """

    name: str
    args: Sequence[Any]
    outputs: Sequence[torch.Tensor]
    device: DeviceSpec


#: From a call to what its kernel does; None: it makes its outputs in order, and nothing else.
Rule = Callable[[Call], Kernel | None]


class KernelBuilder:
    """Collects what a kernel does, in order."""

    def __init__(self) -> None:
        self._steps: list[AllocTemp | FreeTemp | AllocOutput] = []
        self._num_takes = 0

    def take(self, size_bytes: int, category: Category = Category.TEMPORARY) -> int:
        """Take so many bytes; the number to give them back by."""
        self._steps.append(AllocTemp(size_bytes, category))
        self._num_takes += 1
        return self._num_takes - 1

    def take_copy(self, tensor: torch.Tensor | None) -> int | None:
        """Take a contiguous copy of a tensor that is there and not contiguous, as
        `Tensor::contiguous` does; None where it does not.
        """
        return None if tensor is None or tensor.is_contiguous() else self.take(dense_bytes(tensor))

    def give(self, *takes: int | None) -> None:
        """Give these back, in this order; None is nothing."""
        self._steps.extend(FreeTemp(index) for index in takes if index is not None)

    def make(self, *outputs: int) -> None:
        """Make these outputs."""
        self._steps.extend(AllocOutput(index) for index in outputs)

    def make_sized(self, output: int, size_bytes: int) -> None:
        """Make an output with a storage of so many bytes."""
        self._steps.append(AllocOutput(output, size_bytes))

    @property
    def kernel(self) -> Kernel:
        """All of it."""
        return tuple(self._steps)


def dense_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements, each counted once where they overlap not at all."""
    return tensor.numel() * tensor.element_size()


def is_low(dtype: torch.dtype) -> bool:
    """Whether CUDA computes in float32 what is stored in this dtype."""
    return dtype in (torch.float16, torch.bfloat16)


def accumulate_bytes(dtype: torch.dtype) -> int:
    """The bytes of one value of `at::acc_type<dtype, is_cuda=true>`: float32 for half types, itself
    for wider ones, int64 for integers.
    """
    if is_low(dtype):
        return 4
    return dtype.itemsize if dtype.is_floating_point or dtype.is_complex else 8
