"""What one CUDA operator allocates while it runs, as data: KernelRule, KernelCall,
AllocTemp/FreeTemp/AllocOutput.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

from memcallback.core.code_lines import CodeLine
from memcallback.core.types import Category

#: The number of the first allocation that an operator makes for itself; those of tensors are below
#: it.
FIRST_TEMPORARY = 1 << 40


@dataclass(frozen=True)
class KernelCall:
    """The call of an operator whose allocations follow a rule.

    Attributes:
        start: The position of its first event in the trace.
        stop: The position after its last event.
        rule: What it does.
        outputs: The number of the `Alloc` of each tensor that it returns; None for one that it does
            not make.
        handles: The numbers of allocations that it makes besides, and that stay (the workspace of a
            library).
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
    def made(self) -> tuple[int, ...]:
        """The numbers of what it makes and keeps, each once."""
        return tuple(
            dict.fromkeys(
                (*(number for number in self.outputs if number is not None), *self.handles)
            )
        )


@dataclass(frozen=True)
class AllocationSource:
    """Where an allocation comes from.

    Attributes:
        shape: That of the tensor for which it was made.
        dtype: Its type, such as `float32`.
        line: The line of the program that made it; None if none is known.
    """

    shape: tuple[int, ...]
    dtype: str
    line: CodeLine | None


@dataclass(frozen=True)
class AllocTemp:
    """An operator takes memory for itself.

    Attributes:
        size_bytes: How much, at least 0.
        category: `Category.TEMPORARY`, or `Category.WORKSPACE` for what a library asks for (cuDNN).
    """

    size_bytes: int
    category: Category = Category.TEMPORARY


@dataclass(frozen=True)
class FreeTemp:
    """An operator gives back what it took.

    Attributes:
        index: Which of its `AllocTemp`s, from 0.
    """

    index: int


@dataclass(frozen=True)
class AllocOutput:
    """An operator allocates one of its outputs.

    Attributes:
        index: Which of the tensors that it returns, from 0, in the order in which it returns them.
        size_bytes: Its storage, where that does not follow from its shape alone: of rows that are
            padded; else None.
    """

    index: int
    size_bytes: int | None = None


@dataclass(frozen=True)
class OpenBlasHandles:
    """An operator multiplies matrices for the first time: where the libraries open their handles,
    whose workspaces stay.
    """


#: What an operator does, in order. Outputs that it does not name are made at its end, where it
#: multiplies if it says nothing of that; what it does not give back is given back then, in the
#: order in which it was taken.
Kernel = tuple[AllocTemp | FreeTemp | AllocOutput | OpenBlasHandles, ...]


def completed(kernel: Kernel, num_outputs: int) -> Kernel:
    """A kernel with what it does not name: the other outputs are made at its end, then the rest is
    given back.
    """
    made = {step.index for step in kernel if isinstance(step, AllocOutput)}
    given = {step.index for step in kernel if isinstance(step, FreeTemp)}
    num_taken = sum(isinstance(step, AllocTemp) for step in kernel)
    rest = tuple(AllocOutput(index) for index in range(num_outputs) if index not in made)
    multiply = () if OpenBlasHandles() in kernel else (OpenBlasHandles(),)
    return (
        *kernel,
        *rest,
        *multiply,
        *(FreeTemp(index) for index in range(num_taken) if index not in given),
    )


@dataclass(frozen=True)
class KernelRule:
    """What an operator does, as a function of whole numbers that may depend on the batch size.

    An operator's temporaries are no straight line over the batch size: a convolution's workspace is
    the answer of a heuristic, a reduction takes another way above some size. Two traces tell each
    number as a + b * batch size, and the rule is asked again for every batch size.

    Attributes:
        function: Called with the constants and the numbers as one argument each.
        constants: What does not depend on the batch size.
        numbers: What may: sizes and strides of tensors, numbers among the arguments.
    """

    function: Callable[..., Kernel]
    constants: tuple[Hashable, ...]
    numbers: tuple[int, ...]
