"""ConvolutionBuilder: a KernelBuilder that knows copies, layouts and workspaces of convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from memcallback.core.allocation_trace import Fallback
from memcallback.core.types import Category
from memcallback.cuda.convolution.call import ITEM_BYTES, ConvolutionCall, Direction, Layout
from memcallback.cuda.convolution.workspace import (
    all_workspaces_bytes,
    workspace_or_estimate_bytes,
)
from memcallback.cuda.kernels.reduction import channel_sum_bytes
from memcallback.cuda.op_call import KernelBuilder
from memcallback.devices.catalogue import DeviceSpec

#: The outputs of a forward (OUTPUT alone) and of a backward.
OUTPUT = INPUT = 0
WEIGHT, BIAS = 1, 2


class ConvolutionBuilder(KernelBuilder):
    """Collects the allocations of a convolution, and the layouts of its outputs.

    Attributes:
        call: The call.
        device: The card.
        layouts: The layout of each output so far.
    """

    def __init__(self, call: ConvolutionCall, device: DeviceSpec) -> None:
        super().__init__()
        self.call = call
        self.device = device
        self.layouts: dict[int, Layout] = {}

    def lay_out(self, output: int, layout: Layout) -> None:
        """Allocate an output; that of a 1d convolution, viewed as 2d here, is returned as 1d."""
        # A gradient that nobody asks for is not among the tensors that the operator returns.
        self.output(sum(self.call.mask[:output]))
        is_viewed = self.call.is_1d and len(layout.shape) == 4
        self.layouts[output] = layout.squeezed() if is_viewed else layout

    def contiguous(
        self, tensor: Layout, *, channels_last: bool = False
    ) -> tuple[Layout, int | None]:
        """`tensor.contiguous(...)`: the tensor itself, or a copy and its number."""
        if tensor.is_contiguous(channels_last=channels_last):
            return tensor, None
        copy = Layout.dense(tensor.shape, tensor.dtype, channels_last=channels_last)
        return copy, self.alloc(tensor.size_bytes)

    def input_view(self) -> tuple[Layout, int | None]:
        """The input; a 1d input is made contiguous and viewed as 2d."""
        if not self.call.is_1d:
            return self.call.input, None
        flat, copy = self.contiguous(self.call.input)
        return flat.unsqueezed(), copy

    def workspace(
        self, direction: Direction, x_shape: Sequence[int], *, channels_last: bool
    ) -> None:
        """Allocate and free the workspace of cuDNN's plan, which may have 0 bytes."""
        problem = self.call.problem(direction, channels_last)
        size_bytes = workspace_or_estimate_bytes(problem, x_shape, self.device)
        arguments = (problem, tuple(x_shape), self.device)
        fallback = Fallback(all_workspaces_bytes, arguments) if size_bytes else None
        self.free(self.alloc(size_bytes, Category.WORKSPACE, fallback))

    def channel_sum(self, gradient: Layout) -> None:
        """Allocate and free the scratch of a sum over all but the channels."""
        sizes = channel_sum_bytes(
            gradient.shape,
            gradient.strides,
            gradient.dtype == "float64",
            ITEM_BYTES[gradient.dtype],
            self.device,
        )
        self.free(*reversed([self.alloc(size) for size in sizes if size]))

    def bias_gradient(self) -> None:
        """Sum the output's gradient, if the bias needs a gradient."""
        if self.call.mask[BIAS]:
            channels = (self.call.gradient.shape[1],)
            self.lay_out(BIAS, Layout.dense(channels, self.call.input.dtype))
            self.channel_sum(self.call.gradient)
