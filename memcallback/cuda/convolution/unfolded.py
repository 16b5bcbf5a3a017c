"""Convolutions without cuDNN (im2col).

What they take follows ATen/native/cuda/ConvolutionMM2d.cu, NaiveDilatedConvolution.cu,
NaiveConvolutionTranspose2d.cu and NaiveConvolutionTranspose3d.cu of PyTorch 2.11 to 2.13. They go
sample by sample; what is taken anew for every sample stands here once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from memcallback.cuda.convolution.call import ConvolutionCall
from memcallback.cuda.convolution.layout import ITEM_BYTES, Layout
from memcallback.cuda.convolution.steps import BIAS, INPUT, OUTPUT, WEIGHT, KernelBuilder


def slow_convolution(call: ConvolutionCall, steps: KernelBuilder) -> None:
    """Write the steps of a call; groups run one after the other, and are joined at the end."""
    view, viewed = steps.input_view()
    view, copied = steps.contiguous(view)
    weight, weight_copied = steps.contiguous(call.weight)
    gradient = call.gradient
    outputs = _outputs(call, view)
    if call.groups == 1:
        _group(call, steps, _Group(call, steps, view, weight, gradient, outputs))
    else:
        parts: dict[int, list[int]] = {output: [] for output in outputs}
        for _ in range(call.groups):
            gradient_part, gradient_taken = (
                _part(steps, gradient, call.groups) if call.is_backward else (gradient, None)
            )
            view_part, view_taken = _part(steps, view, call.groups)
            weight_part = Layout.dense(
                (weight.shape[0] // call.groups, *weight.shape[1:]), weight.dtype
            )
            group = _Group(call, steps, view_part, weight_part, gradient_part, outputs, parts)
            _group(call, steps, group)
            steps.give(view_taken, gradient_taken)
        for output, layout in outputs.items():
            steps.make(output, layout)
        for output in reversed(outputs):
            steps.give(*parts[output])
    steps.give(weight_copied, copied, viewed)


@dataclass
class _Group:
    """The tensors of one group."""

    call: ConvolutionCall
    steps: KernelBuilder
    view: Layout
    weight: Layout
    gradient: Layout
    outputs: dict[int, Layout]
    parts: dict[int, list[int]] = field(default_factory=dict)

    def make(self, output: int) -> None:
        """An output, or this group's part of it."""
        if output not in self.outputs:
            return
        if self.parts:
            self.parts[output].append(
                self.steps.take(self.outputs[output].size_bytes // self.call.groups)
            )
        else:
            self.steps.make(output, self.outputs[output])

    @property
    def columns_bytes(self) -> int:
        """The columns of one sample: every element of the narrow end has one, as long as the kernel
        over all channels.
        """
        narrow = self.view.shape if self.call.transposed else self.call.y_shape
        return prod(self.weight.shape[1:]) * prod(narrow[2:]) * ITEM_BYTES[self.view.dtype]

    @property
    def unfolds(self) -> bool:
        """Whether columns are anything but the tensor itself, as the kernels without dilation see
        it.
        """
        call = self.call
        return {*call.weight.shape[2:], *call.stride, *call.dilation} != {1} or set(
            call.padding
        ) != {0}


def _group(call: ConvolutionCall, steps: KernelBuilder, group: _Group) -> None:
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
        columns = steps.take(group.columns_bytes) if dilated or group.unfolds else None
        steps.multiply()
        steps.give(columns)


def _plain_backward(group: _Group) -> None:
    """`slow_conv2d_backward_cuda`."""
    steps = group.steps
    gradient, copied = steps.contiguous(group.gradient)
    columns = None
    if INPUT in group.outputs:
        group.make(INPUT)
        columns = steps.take(group.columns_bytes)
        steps.multiply()
    if BIAS in group.outputs:
        group.make(BIAS)
        steps.sum(gradient)
    if WEIGHT in group.outputs:
        group.make(WEIGHT)
        columns = steps.take(group.columns_bytes) if columns is None else columns
        steps.multiply()
    steps.give(columns, copied)


def _dilated_backward(group: _Group) -> None:
    """`slow_conv_dilated2d_backward_cuda` and `slow_conv_dilated3d_backward_cuda`; the sum is that
    of one sample.
    """
    steps = group.steps
    gradient, copied = steps.contiguous(group.gradient)
    for output in (INPUT, WEIGHT, BIAS):
        group.make(output)
    columns = steps.take(group.columns_bytes)
    if {INPUT, WEIGHT} & set(group.outputs):
        steps.multiply()
    if BIAS in group.outputs:
        sample = Layout.dense((1, *gradient.shape[1:]), gradient.dtype)
        total = steps.take(gradient.shape[1] * ITEM_BYTES[gradient.dtype])
        steps.sum(sample)
        steps.give(total)
    steps.give(columns, copied)


def _transposed_forward(group: _Group) -> None:
    """`slow_conv_transpose2d_cuda`, and `slow_conv_transpose3d_cuda`, whose output is made like the
    input and then grows.

    Where it shrinks instead, it keeps the input's size, which is not said here.
    """
    steps, call = group.steps, group.call
    grows = call.is_3d and group.outputs[OUTPUT].size_bytes // call.groups > group.view.size_bytes
    first = steps.take(group.view.size_bytes) if grows else None
    group.make(OUTPUT)
    steps.give(first)
    columns = steps.take(group.columns_bytes)
    ones = (
        steps.take(prod(call.x_shape[2:]) * ITEM_BYTES[group.view.dtype]) if call.has_bias else None
    )
    steps.multiply()
    steps.give(ones, columns)


def _transposed_backward(group: _Group) -> None:
    """`slow_conv_transpose2d_backward_cuda` and `slow_conv_transpose3d_backward_cuda`."""
    steps = group.steps
    if INPUT in group.outputs:
        _, copied = steps.contiguous(group.gradient)
        group.make(INPUT)
        columns = steps.take(group.columns_bytes) if group.unfolds else None
        steps.multiply()
        steps.give(columns, copied)
    if WEIGHT in group.outputs or BIAS in group.outputs:
        group.make(WEIGHT)
        group.make(BIAS)
        gradient, copied = steps.contiguous(group.gradient)
        columns = steps.take(group.columns_bytes) if group.unfolds else None
        if WEIGHT in group.outputs:
            steps.multiply()
        if BIAS in group.outputs:
            steps.sum(gradient)
        steps.give(columns, copied)


def _part(steps: KernelBuilder, tensor: Layout, groups: int) -> tuple[Layout, int | None]:
    """The channels of one group, without gaps, in the layout of the whole."""
    part = Layout(
        (tensor.shape[0], tensor.shape[1] // groups, *tensor.shape[2:]),
        tensor.strides,
        tensor.dtype,
    )
    return steps.contiguous(part, channels_last=tensor.is_channels_last)


def _outputs(call: ConvolutionCall, view: Layout) -> dict[int, Layout]:
    """The outputs that are asked for, all without gaps."""
    if not call.is_backward:
        return {OUTPUT: Layout.dense(call.x_shape if call.transposed else call.y_shape, view.dtype)}
    shapes = (view.shape, call.weight.shape, (call.gradient.shape[1],))
    return {
        output: Layout.dense(shapes[output], view.dtype)
        for output in (INPUT, WEIGHT, BIAS)
        if call.mask[output]
    }
