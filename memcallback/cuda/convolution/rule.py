"""Entry point: which backend a convolution uses and what it allocates.

It follows PyTorch 2.11 to 2.13. Which copies cuDNN's callers make is told by
ATen/native/Convolution.cpp and ATen/native/cudnn/ConvShared.cpp, what the native depthwise kernels
do by ATen/native/cuda/DepthwiseConv2d.cu and DepthwiseConv3d.cu. Tensors are only asked for shape,
strides and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memcallback.core.kernel import Kernel
from memcallback.cuda.convolution import workspace as cudnn
from memcallback.cuda.convolution.call import Backend, ConvolutionCall
from memcallback.cuda.convolution.layout import Layout
from memcallback.cuda.convolution.steps import INPUT, OUTPUT, WEIGHT, KernelBuilder
from memcallback.cuda.convolution.unfolded import slow_convolution
from memcallback.cuda.convolution.workspace import Direction
from memcallback.devices.catalogue import DeviceSpec

#: Shape, strides in elements and dtype.
Output = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def convolution_kernel(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any, device: DeviceSpec
) -> Kernel | None:
    """What a convolution takes while it runs on CUDA."""
    steps = _run(op, args, kwargs, device)
    return None if steps is None else tuple(steps.done)


def convolution_outputs(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: DeviceSpec
) -> list[Output | None] | None:
    """The outputs of a convolution as CUDA lays them out, which may not be how a CPU does."""
    steps = _run(op, args, kwargs, device)
    if steps is None:
        return None
    made = [steps.made.get(output) for output in range(3 if steps.call.is_backward else 1)]
    return [
        None if one is None else (one.shape, one.strides, getattr(torch, one.dtype)) for one in made
    ]


def workspaces_are_known() -> bool:
    """Whether workspaces are cuDNN's own answer.

    They are estimated where no cuDNN is installed that can answer without a device; and with
    `torch.backends.cudnn.benchmark` PyTorch takes the fastest plan, which only the device tells.
    """
    return cudnn.is_available() and not torch.backends.cudnn.benchmark


def _run(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: DeviceSpec
) -> KernelBuilder | None:
    call = ConvolutionCall.of(op, args, kwargs)
    if call is None:
        return None
    steps = KernelBuilder(call, device)
    backend = call.backend(device)
    if backend is Backend.EMPTY:
        _empty(call, steps)
    elif backend is Backend.SLOW:
        slow_convolution(call, steps)
    elif backend is Backend.CUDNN:
        (_cudnn_backward if call.is_backward else _cudnn_forward)(call, steps)
    elif call.is_backward:
        (_depthwise3d_backward if call.is_3d else _depthwise2d_backward)(call, steps)
    else:
        _depthwise_forward(call, steps)
    return steps


def _empty(call: ConvolutionCall, steps: KernelBuilder) -> None:
    """No samples or no channels: an empty output, gradients of zeros."""
    if not call.is_backward:
        steps.make(
            OUTPUT,
            Layout.dense(call.x_shape if call.transposed else call.y_shape, call.input.dtype),
        )
        return
    shapes = (call.view.shape, call.weight.shape, (call.gradient.shape[1],))
    like = (call.view.is_channels_last, call.weight.is_channels_last, False)
    for output, asked in enumerate(call.mask):
        if asked:
            steps.make(
                output, Layout.dense(shapes[output], call.input.dtype, channels_last=like[output])
            )


def _cudnn_forward(call: ConvolutionCall, steps: KernelBuilder) -> None:
    """`_convolution` and `cudnn_convolution` or `cudnn_convolution_transpose`; the bias is added in
    place.
    """
    view, viewed = steps.input_view()
    view, copied = steps.contiguous(view, channels_last=_either(view, call.weight))
    (_backward_data if call.transposed else _forward)(call, steps, view)
    steps.give(copied, viewed)


def _cudnn_backward(call: ConvolutionCall, steps: KernelBuilder) -> None:
    """`convolution_backward` and `cudnn_convolution_backward` or
    `cudnn_convolution_transpose_backward`.
    """
    view, viewed = steps.input_view()
    copied, as_input = None, None
    if call.mask[WEIGHT]:
        view, copied = steps.contiguous(view, channels_last=_either(view, call.weight))
    gradient, like_input = call.gradient, view.is_channels_last
    if call.transposed:
        gradient, as_input = steps.contiguous(gradient, channels_last=like_input)
    elif gradient.is_channels_last != like_input:
        as_input = steps.take(gradient.size_bytes)
        gradient = Layout.dense(gradient.shape, gradient.dtype, channels_last=like_input)
    if call.mask[INPUT]:
        (_forward if call.transposed else _backward_data)(call, steps, gradient)
    if call.mask[WEIGHT]:
        _backward_filter(call, steps, *((gradient, view) if call.transposed else (view, gradient)))
    steps.give(as_input, copied)
    steps.bias_gradient()
    steps.give(viewed)


def _either(first: Layout, second: Layout) -> bool:
    """`cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h: whether it is channels last."""
    return first.dtype != "float64" and (first.is_channels_last or second.is_channels_last)


def _forward(call: ConvolutionCall, steps: KernelBuilder, x: Layout) -> None:
    """`cudnn_convolution_forward_out`, also for the input's gradient of a transposed one; its
    layout is that of its output.
    """
    y_shape = call.problem(Direction.FORWARD, False).output_shape(x.shape)
    y = Layout.dense(y_shape, x.dtype, channels_last=_either(x, call.weight))
    steps.make(OUTPUT, y)
    _, weight = steps.contiguous(call.weight, channels_last=y.is_channels_last)
    _, copied = steps.contiguous(x, channels_last=y.is_channels_last)
    steps.workspace(Direction.FORWARD, x.shape, channels_last=y.is_channels_last)
    steps.give(copied, weight)


def _backward_data(call: ConvolutionCall, steps: KernelBuilder, y: Layout) -> None:
    """`cudnn_convolution_backward_input`, also for the output of a transposed one."""
    channels_last = _either(y, call.weight)
    steps.make(INPUT, Layout.dense(call.x_shape, y.dtype, channels_last=channels_last))
    _, weight = steps.contiguous(call.weight, channels_last=channels_last)
    _, copied = steps.contiguous(y, channels_last=channels_last)
    steps.workspace(Direction.BACKWARD_DATA, call.x_shape, channels_last=channels_last)
    steps.give(copied, weight)


def _backward_filter(call: ConvolutionCall, steps: KernelBuilder, x: Layout, y: Layout) -> None:
    """`cudnn_convolution_backward_weight`."""
    channels_last = _either(x, y)
    _, y_copied = steps.contiguous(y, channels_last=channels_last)
    _, x_copied = steps.contiguous(x, channels_last=channels_last)
    steps.make(WEIGHT, Layout.dense(call.weight.shape, x.dtype, channels_last=channels_last))
    steps.workspace(Direction.BACKWARD_FILTER, x.shape, channels_last=channels_last)
    steps.give(x_copied, y_copied)


def _depthwise_forward(call: ConvolutionCall, steps: KernelBuilder) -> None:
    """`conv_depthwise2d_cuda` and `conv_depthwise3d_cuda`; the bias is added by the kernel."""
    output = Layout.dense(call.y_shape, call.input.dtype)
    view, viewed = steps.input_view()
    _, copied = steps.contiguous(view)
    if call.is_3d:
        steps.make(OUTPUT, output)
    _, weight = steps.contiguous(call.weight)
    if not call.is_3d:
        steps.make(OUTPUT, output)
    steps.give(weight, copied, viewed)


def _depthwise2d_backward(call: ConvolutionCall, steps: KernelBuilder) -> None:
    """`conv_depthwise2d_backward_cuda`."""
    view, viewed = steps.input_view()
    _, gradient = steps.contiguous(call.gradient)
    if call.mask[WEIGHT]:
        _, copied = steps.contiguous(view)
        steps.make(WEIGHT, Layout.dense(call.weight.shape, view.dtype))
        steps.give(copied)
    if call.mask[INPUT]:
        _, weight = steps.contiguous(call.weight)
        steps.make(INPUT, Layout.dense(view.shape, view.dtype))
        steps.give(weight)
    steps.give(gradient)
    steps.bias_gradient()
    steps.give(viewed)


def _depthwise3d_backward(call: ConvolutionCall, steps: KernelBuilder) -> None:
    """`conv_depthwise3d_backward_cuda`."""
    for output, shape in ((INPUT, call.view.shape), (WEIGHT, call.weight.shape)):
        if call.mask[output]:
            steps.make(output, Layout.dense(shape, call.input.dtype))
    read = (
        [call.gradient, call.view, call.weight]
        if call.mask[WEIGHT]
        else [call.gradient, call.weight]
    )
    taken = [steps.contiguous(tensor)[1] for tensor in read]
    steps.bias_gradient()
    steps.give(*reversed(taken))
