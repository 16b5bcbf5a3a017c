"""What one CUDA operator allocates while it runs, as data."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

from memcallback.core.allocation_trace import Fallback
from memcallback.core.code_lines import CodeLine
from memcallback.core.types import Category

#: The id of the first temporary allocation of an operator; the ids of tensors are smaller.
FIRST_TEMPORARY = 1 << 40


@dataclass(frozen=True)
class AllocTemp:
    """Allocate temporary memory.

    Attributes:
        size_bytes: The size, at least 0.
        category: `Category.TEMPORARY`, or `Category.WORKSPACE` for a library's (cuDNN).
        fallback: What is tried if it does not fit; None if the operator then fails.
    """

    size_bytes: int
    category: Category = Category.TEMPORARY
    fallback: Fallback | None = None


@dataclass(frozen=True)
class FreeTemp:
    """Free temporary memory: that of the `AllocTemp` of this index, from 0."""

    index: int


@dataclass(frozen=True)
class AllocOutput:
    """Allocate an output.

    Attributes:
        index: Which of the returned tensors, from 0.
        size_bytes: Its storage if its shape alone does not give it (padded rows), else None.
    """

    index: int
    size_bytes: int | None = None


@dataclass(frozen=True)
class OpenBlasHandles:
    """The first matrix multiplication: creates cuBLAS handles and their persistent workspaces."""


#: What an operator does, in order. `completed` adds what it leaves out.
Kernel = tuple[AllocTemp | FreeTemp | AllocOutput | OpenBlasHandles, ...]


def completed(kernel: Kernel, num_outputs: int) -> Kernel:
    """Add what a kernel leaves out: the other outputs, BLAS handles, then the frees, in order."""
    outputs = {step.index for step in kernel if isinstance(step, AllocOutput)}
    freed = {step.index for step in kernel if isinstance(step, FreeTemp)}
    num_temporaries = sum(isinstance(step, AllocTemp) for step in kernel)
    return (
        *kernel,
        *(AllocOutput(index) for index in range(num_outputs) if index not in outputs),
        *(() if OpenBlasHandles() in kernel else (OpenBlasHandles(),)),
        *(FreeTemp(index) for index in range(num_temporaries) if index not in freed),
    )


@dataclass(frozen=True)
class KernelRule:
    """What an operator does, as a function of whole numbers that may depend on the batch size.

    The temporaries of an operator are not linear in the batch size: a heuristic chooses the
    workspace of a convolution, a reduction changes its algorithm above some size. Two traces give
    each number as a + b * batch size, and the rule is evaluated again at every batch size.

    Attributes:
        function: Called with the constants and the numbers as one argument each.
        constants: What does not depend on the batch size.
        numbers: What may: sizes and strides of tensors, numbers among the arguments.
    """

    function: Callable[..., Kernel]
    constants: tuple[Hashable, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class KernelCall:
    """The call of an operator whose allocations follow a rule.

    Attributes:
        start: The position of its first event in the trace.
        stop: The position after its last event.
        rule: What it does.
        outputs: The id of the `Alloc` of each returned tensor; None for one that it does not
            allocate.
        handles: The ids of other allocations that stay (the workspace of a library).
        operator: Its name.
        module: The module that was running.
        stream: The CUDA stream that was current; 0 is the default one.
    """

    start: int
    stop: int
    rule: KernelRule
    outputs: tuple[int | None, ...]
    handles: tuple[int, ...]
    operator: str
    module: str
    stream: int = 0

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The ids of what it allocates and does not free, each once."""
        outputs = (number for number in self.outputs if number is not None)
        return tuple(dict.fromkeys((*outputs, *self.handles)))


@dataclass(frozen=True)
class AllocationSource:
    """Where an allocation comes from.

    Attributes:
        shape: The shape of the tensor that it was made for.
        dtype: The tensor's type, such as `float32`.
        line: The innermost line outside of PyTorch and Lightning, often a library's; None if none
            ran, as in a backward pass.
        own_line: The innermost line of the user's program; None if none ran.
    """

    shape: tuple[int, ...]
    dtype: str
    line: CodeLine | None
    own_line: CodeLine | None = None
