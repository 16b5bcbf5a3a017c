"""Builder for the allocations of a convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memcallback.core.kernel import AllocOutput, AllocTemp, FreeTemp, OpenBlasHandles
from memcallback.core.types import Category
from memcallback.cuda.convolution.bias import bias_gradient_scratch
from memcallback.cuda.convolution.call import ConvolutionCall
from memcallback.cuda.convolution.layout import Layout
from memcallback.cuda.convolution.workspace import Direction, workspace_or_estimate_bytes
from memcallback.devices.catalogue import DeviceSpec

#: Which output is which: that of a forward, or the gradients of a backward.
OUTPUT = INPUT = 0
WEIGHT, BIAS = 1, 2


@dataclass
class KernelBuilder:
    """The kernel of a call, as far as it is written.

    Attributes:
        call: The call.
        device: Where it runs.
        done: The steps.
        made: By output, how it lies in memory.
    """

    call: ConvolutionCall
    device: DeviceSpec
    done: list[AllocTemp | FreeTemp | AllocOutput | OpenBlasHandles] = field(default_factory=list)
    made: dict[int, Layout] = field(default_factory=dict)
    _num_taken: int = 0

    def take(self, size_bytes: int, category: Category = Category.TEMPORARY) -> int:
        """Take memory; its number, for `give`."""
        self.done.append(AllocTemp(size_bytes, category))
        self._num_taken += 1
        return self._num_taken - 1

    def give(self, *taken: int | None) -> None:
        """Give back, in this order."""
        self.done.extend(FreeTemp(number) for number in taken if number is not None)

    def make(self, output: int, layout: Layout) -> None:
        """Make an output; that of a 1d convolution, seen as 2d here, is known as 1d outside."""
        self.done.append(AllocOutput(output))
        self.made[output] = (
            layout.squeezed() if self.call.is_1d and len(layout.shape) == 4 else layout
        )

    def multiply(self) -> None:
        """Multiply matrices; what matters is the first time."""
        if OpenBlasHandles() not in self.done:
            self.done.append(OpenBlasHandles())

    def contiguous(
        self, tensor: Layout, *, channels_last: bool = False
    ) -> tuple[Layout, int | None]:
        """`tensor.contiguous(...)`: itself, or a copy and its number."""
        if tensor.is_contiguous(channels_last=channels_last):
            return tensor, None
        return Layout.dense(tensor.shape, tensor.dtype, channels_last=channels_last), self.take(
            tensor.size_bytes
        )

    def input_view(self) -> tuple[Layout, int | None]:
        """The input; that of a 1d convolution is made contiguous and seen as 2d."""
        if not self.call.is_1d:
            return self.call.input, None
        flat, taken = self.contiguous(self.call.input)
        return flat.unsqueezed(), taken

    def workspace(
        self, direction: Direction, x_shape: Sequence[int], *, channels_last: bool
    ) -> None:
        """What cuDNN's plan takes; it may be 0 bytes."""
        self.give(
            self.take(
                workspace_or_estimate_bytes(
                    self.call.problem(direction, channels_last), x_shape, self.device
                ),
                Category.WORKSPACE,
            )
        )

    def sum(self, gradient: Layout) -> None:
        """The scratch of a sum over all but the channels."""
        scratch = [
            self.take(size_bytes) for size_bytes in bias_gradient_scratch(gradient, self.device)
        ]
        self.give(*reversed(scratch))

    def bias_gradient(self) -> None:
        """The sum of the output's gradient, if it is asked for."""
        if self.call.mask[BIAS]:
            self.make(BIAS, Layout.dense((self.call.gradient.shape[1],), self.call.input.dtype))
            self.sum(self.call.gradient)
