"""Convolutions without cuDNN, as matrix products of unfolded columns (im2col).

Follows ATen/native/cuda/ConvolutionMM2d.cu, NaiveDilatedConvolution.cu,
NaiveConvolutionTranspose2d.cu and NaiveConvolutionTranspose3d.cu of PyTorch 2.11 to 2.13. They go
sample by sample; an allocation that is repeated for each sample is written once here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from memcallback.cuda.convolution.builder import (
    BIAS,
    INPUT,
    OUTPUT,
    WEIGHT,
    ConvolutionBuilder,
)
from memcallback.cuda.convolution.call import ITEM_BYTES, ConvolutionCall, Layout


def slow_convolution(kernel: ConvolutionBuilder) -> None:
    """Write the kernel of a call; groups run one after the other and are joined at the end."""
    call = kernel.call
    view, view_copy = kernel.input_view()
    view, copy = kernel.contiguous(view)
    weight, weight_copy = kernel.contiguous(call.weight)
    gradient = call.gradient
    outputs = _outputs(call, view)
    if call.groups == 1:
        _group(_Group(kernel, view, weight, gradient, outputs))
    else:
        parts: dict[int, list[int]] = {output: [] for output in outputs}
        for _ in range(call.groups):
            gradient_part, gradient_part_copy = (
                _part(kernel, gradient, call.groups) if call.is_backward else (gradient, None)
            )
            view_part, view_part_copy = _part(kernel, view, call.groups)
            weight_part = Layout.dense(
                (weight.shape[0] // call.groups, *weight.shape[1:]), weight.dtype
            )
            group = _Group(kernel, view_part, weight_part, gradient_part, outputs, parts)
            _group(group)
            kernel.free(view_part_copy, gradient_part_copy)
        for output, layout in outputs.items():
            kernel.lay_out(output, layout)
        for output in reversed(outputs):
            kernel.free(*parts[output])
    kernel.free(weight_copy, copy, view_copy)


@dataclass
class _Group:
    """The tensors of one group of channels."""

    kernel: ConvolutionBuilder
    view: Layout
    weight: Layout
    gradient: Layout
    outputs: dict[int, Layout]
    parts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def call(self) -> ConvolutionCall:
        """The whole convolution."""
        return self.kernel.call

    def make(self, output: int) -> None:
        """Allocate an output, or this group's part of it."""
        if output not in self.outputs:
            return
        if self.parts:
            self.parts[output].append(
                self.kernel.alloc(self.outputs[output].size_bytes // self.call.groups)
            )
        else:
            self.kernel.lay_out(output, self.outputs[output])

    @property
    def columns_bytes(self) -> int:
        """A sample's columns: one per element of `y`, as long as an output channel's weight."""
        narrow = self.view.shape if self.call.transposed else self.call.y_shape
        return prod(self.weight.shape[1:]) * prod(narrow[2:]) * ITEM_BYTES[self.view.dtype]

    @property
    def unfolds(self) -> bool:
        """Whether columns differ from the tensor itself, for the kernels without dilation."""
        call = self.call
        return {*call.weight.shape[2:], *call.stride, *call.dilation} != {1} or set(
            call.padding
        ) != {0}


def _group(group: _Group) -> None:
    kernel, call = group.kernel, group.call
    dilated = call.is_3d or set(call.dilation) != {1}
    if call.is_backward:
        (
            _transposed_backward
            if call.transposed
            else _dilated_backward
            if dilated
            else _plain_backward
        )(group)
    elif call.transposed:
        _transposed_forward(group)
    else:
        group.make(OUTPUT)
        columns = kernel.alloc(group.columns_bytes) if dilated or group.unfolds else None
        kernel.open_blas()
        kernel.free(columns)


def _plain_backward(group: _Group) -> None:
    """`slow_conv2d_backward_cuda`."""
    kernel = group.kernel
    gradient, copy = kernel.contiguous(group.gradient)
    columns = None
    if INPUT in group.outputs:
        group.make(INPUT)
        columns = kernel.alloc(group.columns_bytes)
        kernel.open_blas()
    if BIAS in group.outputs:
        group.make(BIAS)
        kernel.channel_sum(gradient)
    if WEIGHT in group.outputs:
        group.make(WEIGHT)
        columns = kernel.alloc(group.columns_bytes) if columns is None else columns
        kernel.open_blas()
    kernel.free(columns, copy)


def _dilated_backward(group: _Group) -> None:
    """`slow_conv_dilated2d_backward_cuda` and `_dilated3d_`; the sum is over one sample."""
    kernel = group.kernel
    gradient, copy = kernel.contiguous(group.gradient)
    for output in (INPUT, WEIGHT, BIAS):
        group.make(output)
    columns = kernel.alloc(group.columns_bytes)
    if {INPUT, WEIGHT} & set(group.outputs):
        kernel.open_blas()
    if BIAS in group.outputs:
        sample = Layout.dense((1, *gradient.shape[1:]), gradient.dtype)
        total = kernel.alloc(gradient.shape[1] * ITEM_BYTES[gradient.dtype])
        kernel.channel_sum(sample)
        kernel.free(total)
    kernel.free(columns, copy)


def _transposed_forward(group: _Group) -> None:
    """`slow_conv_transpose2d_cuda`, and `_transpose3d_`, whose output starts at the input's size.

    A 3d output smaller than the input keeps the input's size, which is ignored here.
    """
    kernel, call = group.kernel, group.call
    grows = call.is_3d and group.outputs[OUTPUT].size_bytes // call.groups > group.view.size_bytes
    first = kernel.alloc(group.view.size_bytes) if grows else None
    group.make(OUTPUT)
    kernel.free(first)
    columns = kernel.alloc(group.columns_bytes)
    ones = (
        kernel.alloc(prod(call.x_shape[2:]) * ITEM_BYTES[group.view.dtype])
        if call.has_bias
        else None
    )
    kernel.open_blas()
    kernel.free(ones, columns)


def _transposed_backward(group: _Group) -> None:
    """`slow_conv_transpose2d_backward_cuda` and `_transpose3d_`."""
    kernel = group.kernel
    if INPUT in group.outputs:
        _, copy = kernel.contiguous(group.gradient)
        group.make(INPUT)
        columns = kernel.alloc(group.columns_bytes) if group.unfolds else None
        kernel.open_blas()
        kernel.free(columns, copy)
    if WEIGHT in group.outputs or BIAS in group.outputs:
        group.make(WEIGHT)
        group.make(BIAS)
        gradient, copy = kernel.contiguous(group.gradient)
        columns = kernel.alloc(group.columns_bytes) if group.unfolds else None
        if WEIGHT in group.outputs:
            kernel.open_blas()
        if BIAS in group.outputs:
            kernel.channel_sum(gradient)
        kernel.free(columns, copy)


def _part(kernel: ConvolutionBuilder, tensor: Layout, groups: int) -> tuple[Layout, int | None]:
    """The channels of one group, contiguous in the layout of the whole."""
    part = Layout(
        (tensor.shape[0], tensor.shape[1] // groups, *tensor.shape[2:]),
        tensor.strides,
        tensor.dtype,
    )
    return kernel.contiguous(part, channels_last=tensor.is_channels_last)


def _outputs(call: ConvolutionCall, view: Layout) -> dict[int, Layout]:
    """The outputs that are asked for, all contiguous."""
    if not call.is_backward:
        return {OUTPUT: Layout.dense(call.x_shape if call.transposed else call.y_shape, view.dtype)}
    shapes = (view.shape, call.weight.shape, (call.gradient.shape[1],))
    return {
        output: Layout.dense(shapes[output], view.dtype)
        for output in (INPUT, WEIGHT, BIAS)
        if call.mask[output]
    }
