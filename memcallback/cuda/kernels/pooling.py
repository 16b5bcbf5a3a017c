"""Kernels of pooling, and of others that copy images into one layout: im2col, affine grids."""

from __future__ import annotations

import math

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.torch_private import suggest_memory_format
from memcallback.cuda.op_call import KernelBuilder, OpCall, Rule, dense_bytes


def _in_layout(kernel: KernelBuilder, layout: torch.memory_format, *tensors: torch.Tensor) -> None:
    """Allocate copies of tensors that are in another layout, and free them."""
    copies = [
        kernel.alloc(dense_bytes(tensor))
        for tensor in tensors
        if not tensor.is_contiguous(memory_format=layout)
    ]
    kernel.free(*reversed(copies))


def _pool(call: OpCall) -> Kernel:
    """`max_pool2d_with_indices` (DilatedMaxPool2d.cu), `avg_pool2d` (AveragePool2d.cu).

    Outputs, then a copy of the input in the layout that its strides suggest.
    """
    x = call.arguments[0]
    kernel = KernelBuilder()
    kernel.output(*range(len(call.outputs)))
    _in_layout(kernel, suggest_memory_format(x), x)
    return kernel.build()


def _pool_of_volumes(call: OpCall) -> Kernel:
    """`max_pool3d_with_indices` (DilatedMaxPool3d.cu): the same for volumes in a batch."""
    return _pool(call) if call.arguments[0].ndim == 5 else _outputs_then_copy(call)


def _pool_backward(call: OpCall) -> Kernel:
    """The same for a gradient: copies of gradient, input and indices in the input's layout."""
    grad, x = call.arguments[:2]
    tensors = [grad, x, call.arguments[-1]] if "max" in call.name else [x, grad]
    kernel = KernelBuilder()
    kernel.output(0)
    _in_layout(kernel, suggest_memory_format(x), *tensors)
    return kernel.build()


def _max_pool3d_backward(call: OpCall) -> Kernel:
    """`max_pool3d_with_indices_backward` (DilatedMaxPool3d.cu), which does not read the input."""
    grad, x, indices = *call.arguments[:2], call.arguments[-1]
    layout = suggest_memory_format(x) if x.ndim == 5 else torch.contiguous_format
    kernel = KernelBuilder()
    kernel.output(0)
    _in_layout(kernel, layout, grad, indices)
    return kernel.build()


def _outputs_then_copy(call: OpCall) -> Kernel:
    """Of volumes, and of gradients of averages: a contiguous copy of the first argument."""
    kernel = KernelBuilder()
    kernel.output(*range(len(call.outputs)))
    kernel.free(kernel.alloc_copy(call.arguments[0]))
    return kernel.build()


def _copy_then_output(call: OpCall) -> Kernel:
    """`max_unpool2d` (MaxUnpooling.cu): contiguous copies before the output."""
    tensors = call.arguments[:1] if "backward" in call.name else call.inputs
    kernel = KernelBuilder()
    copies = [kernel.alloc_copy(tensor) for tensor in tensors]
    kernel.output(0)
    kernel.free(*reversed(copies))
    return kernel.build()


def _adaptive_of_volumes(call: OpCall) -> Kernel | None:
    """AdaptiveAveragePooling3d.cu, AdaptiveMaxPooling3d.cu: a single volume is not copied."""
    if call.arguments[0].ndim == 4:
        return None
    return _outputs_then_copy(call) if "max" in call.name else _copy_then_output(call)


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.ndim == 4 and suggest_memory_format(x) is torch.channels_last


def _adaptive_average(call: OpCall) -> Kernel | None:
    """`adaptive_avg_pool2d` (AdaptiveAveragePooling.cu) reads channels last by their strides."""
    x = call.arguments[0]
    return None if _is_channels_last(x) or x.ndim == 3 else _copy_then_output(call)


def _adaptive_average_backward(call: OpCall) -> Kernel | None:
    return None if _is_channels_last(call.arguments[1]) else _outputs_then_copy(call)


def _contiguous(call: OpCall) -> Kernel:
    """`adaptive_max_pool2d` (AdaptiveMaxPooling2d.cu), `upsample_nearest3d`: contiguous tensors.

    Outputs in another layout are computed into contiguous ones.
    """
    kernel = KernelBuilder()
    kernel.output(*range(len(call.outputs)))
    is_single = call.name == "adaptive_max_pool2d" and call.arguments[0].ndim == 3
    tensors = [*call.outputs, *(() if is_single else call.arguments[:1])]
    copies = [kernel.alloc_copy(tensor) for tensor in tensors]
    kernel.free(*reversed(copies))
    return kernel.build()


def _upsampling(call: OpCall) -> Kernel | None:
    """UpSampleNearest2d.cu, UpSampleBilinear2d.cu: four channels or more that are last stay so.

    Other images are read by their strides for `bilinear`.
    """
    x, output = call.arguments[0], call.outputs[0]
    last = torch.channels_last
    if x.shape[1] >= 4 and _is_channels_last(x) and output.is_contiguous(memory_format=last):
        return _pool(call)
    return _contiguous(call) if "nearest" in call.name else None


def _adaptive_max_backward(call: OpCall) -> Kernel:
    grad, _, indices = call.arguments[:3]
    kernel = KernelBuilder()
    kernel.output(0)
    copies = [kernel.alloc_copy(tensor) for tensor in (grad, indices, call.outputs[0])]
    kernel.free(*reversed(copies))
    return kernel.build()


def _unfold(call: OpCall) -> Kernel:
    """`im2col_out_cuda_template` (Im2Col.cu) and its reverse: the output starts like the input."""
    x, output = call.arguments[0], call.outputs[0]
    kernel = KernelBuilder()
    grows = output.numel() > x.numel()
    small = kernel.alloc(dense_bytes(x)) if grows else None
    if not grows:
        kernel.output(0)
    copy = kernel.alloc_copy(x)
    if grows:
        kernel.output(0)
    kernel.free(small, copy)
    return kernel.build()


def _affine_grid(call: OpCall) -> Kernel:
    """`affine_grid_generator` (AffineGridGenerator.cpp): all positions, times the matrices."""
    theta, size, align_corners = call.arguments
    itemsize, (batch, _, *sides) = theta.element_size(), size
    kernel = KernelBuilder()
    positions = kernel.alloc(batch * math.prod(sides) * (len(sides) + 1) * itemsize)
    for side in reversed(sides):
        if side <= 1:
            kernel.free(kernel.alloc(itemsize))
            continue
        parts = [kernel.alloc(side * itemsize) for _ in range(1 if align_corners else 3)]
        kernel.free(*parts)
    kernel.output(0)
    kernel.open_blas()
    kernel.free(positions)
    return kernel.build()


RULES: dict[str, Rule] = {
    "max_pool2d_with_indices": _pool,
    "max_pool3d_with_indices": _pool_of_volumes,
    "avg_pool2d": _pool,
    "avg_pool3d": _outputs_then_copy,
    "max_pool2d_with_indices_backward": _pool_backward,
    "max_pool3d_with_indices_backward": _max_pool3d_backward,
    "avg_pool2d_backward": _pool_backward,
    "avg_pool3d_backward": _outputs_then_copy,
    "_adaptive_avg_pool2d": _adaptive_average,
    "_adaptive_avg_pool3d": _adaptive_of_volumes,
    "_adaptive_avg_pool2d_backward": _adaptive_average_backward,
    "_adaptive_avg_pool3d_backward": _outputs_then_copy,
    "adaptive_max_pool2d": _contiguous,
    "adaptive_max_pool3d": _adaptive_of_volumes,
    "adaptive_max_pool2d_backward": _adaptive_max_backward,
    "adaptive_max_pool3d_backward": _adaptive_max_backward,
    "max_unpool2d": _copy_then_output,
    "_upsample_bilinear2d_aa": _contiguous,
    **dict.fromkeys(
        ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d"), _upsampling
    ),
    **dict.fromkeys(("upsample_nearest3d", "_upsample_nearest_exact3d"), _contiguous),
    "fractional_max_pool2d_backward": _copy_then_output,
    "im2col": _unfold,
    "col2im": _unfold,
    "affine_grid_generator": _affine_grid,
}
