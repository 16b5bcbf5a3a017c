"""Results as CUDA returns them, where PyTorch's fake kernels differ in dtype, stride or size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memcallback.core.units import round_up
from memcallback.cuda.op_call import Correction, OpCall, is_low


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.new_empty(tensor.shape)


def _first_contiguous(call: OpCall) -> Any:
    """The first output is contiguous, whatever the input."""
    if isinstance(call.result, torch.Tensor):
        return None if call.result.is_contiguous() else _contiguous(call.result)
    first, *rest = call.result
    return None if first is None or first.is_contiguous() else (_contiguous(first), *rest)


def _layer_norm(call: OpCall) -> Any:
    """Statistics in the accumulation type, output contiguous (layer_norm_kernel.cu)."""
    y, *stats = call.result
    if not is_low(y.dtype) and y.is_contiguous():
        return None
    return (
        _contiguous(y),
        *(s.new_empty(s.shape, dtype=torch.float32) if is_low(s.dtype) else s for s in stats),
    )


def _batch_norm(call: OpCall) -> Any:
    """Saved statistics in the accumulation type, in evaluation too.

    `batch_norm_cuda` (Normalization.cu).
    """
    y, mean, invstd, *rest = call.result
    channels = y.shape[1]
    dtype = torch.float32 if is_low(y.dtype) else y.dtype
    if mean.dtype == dtype and mean.shape == (channels,):
        return None
    return (
        y,
        mean.new_empty(channels, dtype=dtype),
        invstd.new_empty(channels, dtype=dtype),
        *rest,
    )


def _cudnn_batch_norm(call: OpCall) -> Any:
    """As other batch norms in training; in evaluation cuDNN saves no statistics."""
    is_training = call.arguments[5]
    return _batch_norm(call) if is_training else None


def _batch_norm_backward(call: OpCall) -> Any:
    """Only gradients that the mask asks for; the input's is contiguous in evaluation.

    `batch_norm_backward_cuda` (Normalization.cu).
    """
    is_training, mask = call.arguments[7], call.arguments[9]
    first, *rest = (g if wanted else None for g, wanted in zip(call.result, mask, strict=True))
    if not is_training and first is not None:
        first = _contiguous(first)
    return first, *rest


def _embedding_bag(call: OpCall) -> Any:
    """Bag sizes as long as the offsets, and largest indices for the mode max only.

    `_embedding_bag_cuda` (EmbeddingBag.cu).
    """
    _, indices, offsets, _, mode = call.arguments[:5]
    output, offset2bag, bag_size, largest = call.result
    if mode == 2:
        return None
    return (
        output,
        offset2bag.new_empty(indices.shape),
        bag_size.new_empty(offsets.shape),
        largest.new_empty(0),
    )


def _efficient_attention(call: OpCall) -> Any:
    """Seed and offset of the generator are on the host unless a CUDA graph is captured.

    `_efficient_attention_forward` (attention.cu). They are empty here, since each fake is a CUDA
    tensor.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    output, logsumexp, seed, offset, *rest = call.result
    return (output, logsumexp, seed.new_empty(0), offset.new_empty(0), *rest)


def _cudnn_attention(call: OpCall) -> Any:
    """No logsumexp without a gradient: `_scaled_dot_product_cudnn_attention_cuda`, attention.cu."""
    needs_gradient = call.arguments[4]
    output, logsumexp, *rest = call.result
    return None if needs_gradient else (output, logsumexp.new_empty(0), *rest)


def _scaled_efficient_attention_backward(call: OpCall) -> Any:
    """The bias's gradient is cut from rows of a multiple of 16 (attention_backward.cu).

    The cache of a fake mode forgets that.
    """
    *gradients, bias = call.result
    if bias is None or bias.shape[-1] % 16 == 0:
        return None
    whole = bias.new_empty((*bias.shape[:-1], round_up(bias.shape[-1], 16)))
    return (*gradients, whole[..., : bias.shape[-1]])


def _efficient_attention_backward(call: OpCall) -> Any:
    """No gradient of a bias that was not given, for which the fake kernel returns a number."""
    result = call.result
    return (*result[:3], result[3].new_empty(0)) if call.arguments[4] is None else None


def _reduced_loss(call: OpCall) -> Any:
    """A reduced loss is written into the storage of the unreduced one (Loss.cu, Loss.cpp)."""
    shape = torch.broadcast_shapes(call.arguments[0].shape, call.arguments[1].shape)
    if call.result.ndim or shape.numel() <= 1:
        return None
    return call.result.new_empty(shape).as_strided((), ())


def _log_sigmoid(call: OpCall) -> Any:
    """No buffer, which is for the CPU alone (`log_sigmoid_forward_cuda`, Activation.cpp)."""
    return call.result[0], call.result[1].new_empty(0)


def _like_input(call: OpCall) -> Any:
    """The output starts as an empty tensor like the input (`col2im_cuda`, Col2Im.cu)."""
    x, output = call.arguments[0], call.result
    if x.numel() <= output.numel():
        return None
    return output.new_empty(x.numel()).as_strided(output.shape, output.stride())


def _like_gradient(call: OpCall) -> Any:
    """The layout of the gradient, the first operand, by which TensorIterator orders."""
    grad, result = call.arguments[0], call.result
    if grad.shape != result.shape or grad.stride() == result.stride() or 0 in grad.stride():
        return None
    return torch.empty_like(grad, dtype=result.dtype)


def _power(call: OpCall) -> Any:
    """A number to the power of a tensor is contiguous (Pow.cpp)."""
    base, exponent = call.arguments[:2]
    is_tensor = isinstance(base, torch.Tensor)
    return None if is_tensor or 0 in exponent.stride() else _first_contiguous(call)


def _dropout(call: OpCall) -> Any:
    """A copy of the input where nothing is dropped (`native_dropout_cuda`, Dropout.cu)."""
    x, p, train = call.arguments
    return None if train is not False and p else (torch.empty_like(x), call.result[1])


def _weight_norm(call: OpCall) -> Any:
    """Norms in float32 for half types (WeightNorm.cu)."""
    weight, norms = call.result
    if not is_low(norms.dtype):
        return None
    return weight, norms.new_empty(norms.shape, dtype=torch.float32)


def _unique(call: OpCall) -> Any:
    """No inverse with counts alone (UniqueCub.cu); a CPU makes one."""
    values, inverse, counts = call.result
    has_inverse = call.arguments[2]
    return None if has_inverse else (values, inverse.new_empty(0), counts)


CORRECTIONS: dict[str, Correction] = {
    "_unique2": _unique,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), _batch_norm
    ),
    "cudnn_batch_norm": _cudnn_batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _first_contiguous,
    "native_group_norm_backward": _first_contiguous,
    "_scaled_dot_product_efficient_attention": _efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": _scaled_efficient_attention_backward,
    "_efficient_attention_forward": _efficient_attention,
    "_efficient_attention_backward": _efficient_attention_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn_attention,
    **dict.fromkeys(
        ("binary_cross_entropy", "soft_margin_loss", "mse_loss", "smooth_l1_loss"), _reduced_loss
    ),
    # `zeros_like` with LEGACY_CONTIGUOUS_MEMORY_FORMAT in Loss.cpp.
    **dict.fromkeys(
        ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"), _first_contiguous
    ),
    "log_sigmoid_forward": _log_sigmoid,
    "elu_backward": _like_gradient,
    "hardsigmoid_backward": _like_gradient,
    "hardswish_backward": _like_gradient,
    "hardtanh_backward": _like_gradient,
    "softplus_backward": _like_gradient,
    "xlogy": _like_gradient,
    "pixel_shuffle": _first_contiguous,
    "pixel_unshuffle": _first_contiguous,
    "reflection_pad2d": _first_contiguous,
    "replication_pad2d": _first_contiguous,
    "col2im": _like_input,
    "max_unpool2d": _first_contiguous,
    "im2col": _like_input,
    "_weight_norm_interface": _weight_norm,
    "pow": _power,
    "native_dropout": _dropout,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
}

#: Rows of a grouped matrix product begin at multiples of this many bytes.
_ROW_BYTES = 16


def _histc(call: OpCall) -> torch.Tensor | None:
    """CUDA takes whole numbers, which the fake kernel refuses, as a CPU does."""
    return None if call.card is None else call.arguments[0].new_empty(call.arguments[1])


def _grouped_mm(call: OpCall) -> torch.Tensor:
    """`create_grouped_gemm_output_tensor` (GroupedMMUtils.h): any dtype, padded rows.

    The fake kernel takes bfloat16 alone.
    """
    mat_a, mat_b, offsets, _, out_dtype = call.arguments
    shape = [mat_a.shape[-2], mat_b.shape[-1]]
    if mat_a.dim() == mat_b.dim():
        shape.insert(0, mat_a.shape[0] if offsets is None else offsets.shape[0])
    dtype = out_dtype or mat_a.dtype
    padded = round_up(shape[-1], _ROW_BYTES // dtype.itemsize)
    strides = [shape[-2] * padded, padded, 1][-len(shape) :]
    return mat_a.new_empty_strided(shape, strides, dtype=dtype)  # type: ignore[no-any-return]


def _product_in_another_dtype(call: OpCall) -> torch.Tensor | None:
    """`addmm(..., out_dtype=...)`: the fake kernel of PyTorch 2.11 takes the dtype for `beta`."""
    if call.op._overloadname not in ("dtype", "dtype_out"):
        return None
    if (given := call.kwargs.get("out")) is not None:
        return given  # type: ignore[no-any-return]
    _, mat_a, mat_b, dtype = call.arguments[:4]
    return mat_a.new_empty((*mat_a.shape[:-1], mat_b.shape[-1]), dtype=dtype)  # type: ignore[no-any-return]


#: Most dimensions that cuFFT transforms at once.
_MAX_FFT_DIMS = 3


def _transformed(x: torch.Tensor, shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """`_exec_fft` (SpectralOps.cpp): the transformed dimensions come last, in their order.

    All others come before, those with the largest strides first.
    """
    before = x.stride()
    others = sorted((d for d in range(x.ndim) if d not in dims), key=lambda d: -before[d])
    order = [*others, *dims]
    dense = torch.empty([shape[d] for d in order], device="meta").stride()
    strides = [dense[order.index(d)] for d in range(x.ndim)]
    dtype = x.dtype.to_complex()
    return x.new_empty_strided(shape, strides, dtype=dtype)


def _transformed_in_parts(
    x: torch.Tensor, shape: Sequence[int], dims: Sequence[int]
) -> torch.Tensor:
    """Complex transforms of at most three dimensions at a time, the largest strides last."""
    left = list(dims)
    while left:
        before = x.stride()
        left = sorted(left, key=before.__getitem__, reverse=True)
        left, now = left[:-_MAX_FFT_DIMS], left[-_MAX_FFT_DIMS:]
        x = _transformed(x, shape, now)
    return x


def _fft_of_complex(call: OpCall) -> torch.Tensor | None:
    """`_fft_c2c_cufft` (SpectralOps.cpp); the fake kernel mixes up the sizes of dimensions."""
    x, dims = call.arguments[:2]
    if not dims:
        return None
    return _transformed_in_parts(x, x.shape, dims)


def _fft_of_real(call: OpCall) -> torch.Tensor | None:
    """`_fft_r2c_cufft`: the first two dimensions, or more than three, one after the other."""
    x, dims, _, is_one_sided = call.arguments
    is_at_once = len(dims) <= _MAX_FFT_DIMS and list(dims[:2]) != [0, 1]
    if call.card is None or not (is_at_once or is_one_sided):
        return None
    shape = list(x.shape)
    if is_one_sided:
        shape[dims[-1]] = shape[dims[-1]] // 2 + 1
    if is_at_once:
        return _transformed(x, shape, dims)
    return _transformed_in_parts(_transformed(x, shape, dims[-1:]), shape, dims[:-1])


#: Operators with failing fake kernels -> the result; None to run the fake kernel.
REPLACEMENTS: dict[str, Callable[[OpCall], torch.Tensor | None]] = {
    "_fft_c2c": _fft_of_complex,
    "_fft_r2c": _fft_of_real,
    "_ctc_loss_backward": lambda call: call.args[1].new_empty(call.args[1].shape),
    "addmm": _product_in_another_dtype,
    "baddbmm": _product_in_another_dtype,
    "histc": _histc,
    "_grouped_mm": _grouped_mm,
}
