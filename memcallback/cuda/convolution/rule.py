"""Which backend computes a convolution on CUDA, what it allocates, and the layout of its outputs.

Follows PyTorch 2.11 to 2.13: the copies around cuDNN are those of ATen/native/Convolution.cpp and
ATen/native/cudnn/ConvShared.cpp, the native depthwise kernels are in
ATen/native/cuda/DepthwiseConv2d.cu and DepthwiseConv3d.cu.
"""

from __future__ import annotations

from typing import Any

import torch

from memcallback.core.kernel import Kernel
from memcallback.cuda.convolution import cudnn
from memcallback.cuda.convolution.builder import INPUT, OUTPUT, WEIGHT, ConvolutionBuilder
from memcallback.cuda.convolution.call import Backend, ConvolutionCall, Direction, Layout
from memcallback.cuda.convolution.unfolded import slow_convolution
from memcallback.cuda.op_call import Correction, OpCall, Rule


def convolution_kernel(call: OpCall) -> Kernel | None:
    """The kernel of a convolution; None for dtypes that CUDA does not convolve."""
    kernel = _run(call)
    return None if kernel is None else kernel.build()


def convolution_outputs(call: OpCall) -> Any:
    """The result in the layout that CUDA gives it, which may not be a CPU's."""
    kernel = _run(call)
    if kernel is None:
        return None
    if isinstance(call.result, torch.Tensor):
        return _with_layout(call.result, kernel.layouts[OUTPUT])
    return tuple(
        _with_layout(gradient, kernel.layouts.get(output))
        for output, gradient in enumerate(call.result)
    )


RULES: dict[str, Rule] = dict.fromkeys(
    ("convolution", "_convolution", "convolution_backward"), convolution_kernel
)
CORRECTIONS: dict[str, Correction] = dict.fromkeys(RULES, convolution_outputs)


def workspaces_are_known() -> bool:
    """Whether workspaces are cuDNN's own answer.

    They are estimates where no cuDNN is installed that answers without a device. With
    `torch.backends.cudnn.benchmark` PyTorch takes the fastest plan, which needs the device.
    """
    return cudnn.is_available() and not torch.backends.cudnn.benchmark


def _with_layout(tensor: torch.Tensor | None, layout: Layout | None) -> torch.Tensor | None:
    if tensor is None or layout is None or Layout.of(tensor) == layout:
        return tensor
    dtype = getattr(torch, layout.dtype)
    return tensor.new_empty_strided(layout.shape, layout.strides, dtype=dtype)


def _run(op_call: OpCall) -> ConvolutionBuilder | None:
    call = ConvolutionCall.of(op_call)
    if call is None:
        return None
    kernel = ConvolutionBuilder(call, op_call.device)
    backend = call.backend(op_call.device)
    if backend is Backend.EMPTY:
        _empty(kernel)
    elif backend is Backend.SLOW:
        slow_convolution(kernel)
    elif backend is Backend.CUDNN:
        (_cudnn_backward if call.is_backward else _cudnn_forward)(kernel)
    elif call.is_backward:
        (_depthwise3d_backward if call.is_3d else _depthwise2d_backward)(kernel)
    else:
        _depthwise_forward(kernel)
    return kernel


def _empty(kernel: ConvolutionBuilder) -> None:
    """Without samples or channels: an empty output, gradients of zeros."""
    call = kernel.call
    if not call.is_backward:
        kernel.lay_out(
            OUTPUT,
            Layout.dense(call.x_shape if call.transposed else call.y_shape, call.input.dtype),
        )
        return
    shapes = (call.view.shape, call.weight.shape, (call.gradient.shape[1],))
    like = (call.view.is_channels_last, call.weight.is_channels_last, False)
    for output, asked in enumerate(call.mask):
        if asked:
            kernel.lay_out(
                output, Layout.dense(shapes[output], call.input.dtype, channels_last=like[output])
            )


def _cudnn_forward(kernel: ConvolutionBuilder) -> None:
    """`_convolution` and `cudnn_convolution(_transpose)`; the bias is added in place."""
    call = kernel.call
    view, view_copy = kernel.input_view()
    view, copy = kernel.contiguous(view, channels_last=_either(view, call.weight))
    (_backward_data if call.transposed else _forward)(kernel, view)
    kernel.free(copy, view_copy)


def _cudnn_backward(kernel: ConvolutionBuilder) -> None:
    """`convolution_backward` and `cudnn_convolution(_transpose)_backward`."""
    call = kernel.call
    view, view_copy = kernel.input_view()
    copy, as_input = None, None
    if call.mask[WEIGHT]:
        view, copy = kernel.contiguous(view, channels_last=_either(view, call.weight))
    gradient, like_input = call.gradient, view.is_channels_last
    if call.transposed:
        gradient, as_input = kernel.contiguous(gradient, channels_last=like_input)
    elif gradient.is_channels_last != like_input:
        as_input = kernel.alloc(gradient.size_bytes)
        gradient = Layout.dense(gradient.shape, gradient.dtype, channels_last=like_input)
    if call.mask[INPUT]:
        (_forward if call.transposed else _backward_data)(kernel, gradient)
    if call.mask[WEIGHT]:
        _backward_filter(kernel, *((gradient, view) if call.transposed else (view, gradient)))
    kernel.free(as_input, copy)
    kernel.bias_gradient()
    kernel.free(view_copy)


def _either(first: Layout, second: Layout) -> bool:
    """Whether `cudnn_conv_suggest_memory_format` (ConvUtils.h) gives channels last."""
    return first.dtype != "float64" and (first.is_channels_last or second.is_channels_last)


def _forward(kernel: ConvolutionBuilder, x: Layout) -> None:
    """`cudnn_convolution_forward_out`, also for the input gradient of a transposed convolution."""
    call = kernel.call
    y_shape = call.problem(Direction.FORWARD, False).output_shape(x.shape)
    y = Layout.dense(y_shape, x.dtype, channels_last=_either(x, call.weight))
    kernel.lay_out(OUTPUT, y)
    _, weight = kernel.contiguous(call.weight, channels_last=y.is_channels_last)
    _, copy = kernel.contiguous(x, channels_last=y.is_channels_last)
    kernel.workspace(Direction.FORWARD, x.shape, channels_last=y.is_channels_last)
    kernel.free(copy, weight)


def _backward_data(kernel: ConvolutionBuilder, y: Layout) -> None:
    """`cudnn_convolution_backward_input`, also for the output of a transposed convolution."""
    call = kernel.call
    channels_last = _either(y, call.weight)
    kernel.lay_out(INPUT, Layout.dense(call.x_shape, y.dtype, channels_last=channels_last))
    _, weight = kernel.contiguous(call.weight, channels_last=channels_last)
    _, copy = kernel.contiguous(y, channels_last=channels_last)
    kernel.workspace(Direction.BACKWARD_DATA, call.x_shape, channels_last=channels_last)
    kernel.free(copy, weight)


def _backward_filter(kernel: ConvolutionBuilder, x: Layout, y: Layout) -> None:
    """`cudnn_convolution_backward_weight`."""
    call = kernel.call
    channels_last = _either(x, y)
    _, y_copy = kernel.contiguous(y, channels_last=channels_last)
    _, x_copy = kernel.contiguous(x, channels_last=channels_last)
    kernel.lay_out(WEIGHT, Layout.dense(call.weight.shape, x.dtype, channels_last=channels_last))
    kernel.workspace(Direction.BACKWARD_FILTER, x.shape, channels_last=channels_last)
    kernel.free(x_copy, y_copy)


def _depthwise_forward(kernel: ConvolutionBuilder) -> None:
    """`conv_depthwise2d_cuda` and `conv_depthwise3d_cuda`; the kernel adds the bias."""
    call = kernel.call
    output = Layout.dense(call.y_shape, call.input.dtype)
    view, view_copy = kernel.input_view()
    _, copy = kernel.contiguous(view)
    if call.is_3d:
        kernel.lay_out(OUTPUT, output)
    _, weight = kernel.contiguous(call.weight)
    if not call.is_3d:
        kernel.lay_out(OUTPUT, output)
    kernel.free(weight, copy, view_copy)


def _depthwise2d_backward(kernel: ConvolutionBuilder) -> None:
    """`conv_depthwise2d_backward_cuda`."""
    call = kernel.call
    view, view_copy = kernel.input_view()
    _, gradient = kernel.contiguous(call.gradient)
    if call.mask[WEIGHT]:
        _, copy = kernel.contiguous(view)
        kernel.lay_out(WEIGHT, Layout.dense(call.weight.shape, view.dtype))
        kernel.free(copy)
    if call.mask[INPUT]:
        _, weight = kernel.contiguous(call.weight)
        kernel.lay_out(INPUT, Layout.dense(view.shape, view.dtype))
        kernel.free(weight)
    kernel.free(gradient)
    kernel.bias_gradient()
    kernel.free(view_copy)


def _depthwise3d_backward(kernel: ConvolutionBuilder) -> None:
    """`conv_depthwise3d_backward_cuda`."""
    call = kernel.call
    for output, shape in ((INPUT, call.view.shape), (WEIGHT, call.weight.shape)):
        if call.mask[output]:
            kernel.lay_out(output, Layout.dense(shape, call.input.dtype))
    read = (
        [call.gradient, call.view, call.weight]
        if call.mask[WEIGHT]
        else [call.gradient, call.weight]
    )
    copies = [kernel.contiguous(tensor)[1] for tensor in read]
    kernel.bias_gradient()
    kernel.free(*reversed(copies))
