"""Fix the dtype, stride or size of outputs where PyTorch's fake kernels differ from CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memcallback.core.units import round_up
from memcallback.cuda.decompositions.attention import attention_outputs
from memcallback.cuda.kernels.call import is_low

#: From arguments in the order of the schema and the result to a better result; None where it is
#: right.
Correction = Callable[[Sequence[Any], Any], Any]


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.new_empty(tensor.shape)


def _layer_norm(args: Sequence[Any], result: Any) -> Any:
    """Statistics in the accumulation type, output contiguous (layer_norm_cuda,
    layer_norm_kernel.cu).
    """
    y, *stats = result
    if not is_low(y.dtype) and y.is_contiguous():
        return None
    return (
        _contiguous(y),
        *(s.new_empty(s.shape, dtype=torch.float32) if is_low(s.dtype) else s for s in stats),
    )


def _layer_norm_backward(args: Sequence[Any], result: Any) -> Any:
    """Gradient of the input contiguous (layer_norm_backward_cuda)."""
    if result[0] is None or result[0].is_contiguous():
        return None
    return (_contiguous(result[0]), *result[1:])


def _batch_norm(args: Sequence[Any], result: Any) -> Any:
    """Saved statistics in the accumulation type, and there in evaluation too (batch_norm_cuda,
    Normalization.cu).
    """
    y, mean, invstd, *rest = result
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


def _batch_norm_backward(args: Sequence[Any], result: Any) -> Any:
    """No gradient where none is asked for; that of the input contiguous in evaluation
    (batch_norm_backward_cuda, Normalization.cu).
    """
    first, *rest = (g if wanted else None for g, wanted in zip(result, args[9], strict=True))
    if not args[7] and first is not None:
        first = _contiguous(first)
    return first, *rest


def _embedding_bag(args: Sequence[Any], result: Any) -> Any:
    """Bag sizes as long as the offsets; no largest indices but for the mode max
    (_embedding_bag_cuda, EmbeddingBag.cu).
    """
    output, offset2bag, bag_size, largest = result
    offsets, mode = args[2], args[4]
    if mode == 2:
        return None
    return (
        output,
        offset2bag.new_empty(args[1].shape),
        bag_size.new_empty(offsets.shape),
        largest.new_empty(0),
    )


def _efficient_attention(args: Sequence[Any], result: Any) -> Any:
    """Seed and offset of the generator are on the host (attention.cu): here empty, since every fake
    stands for a CUDA tensor.
    """
    output, logsumexp, seed, offset, *rest = result
    return (output, logsumexp, seed.new_empty(0), offset.new_empty(0), *rest)


def _efficient_attention_backward(args: Sequence[Any], result: Any) -> Any:
    """The gradient of the bias: rows of a multiple of 16 in its storage (attention_backward.cu),
    which a fake mode's cache forgets.
    """
    *grads, bias = result
    if bias is None or bias.shape[-1] % 16 == 0:
        return None
    whole = bias.new_empty((*bias.shape[:-1], round_up(bias.shape[-1], 16)))
    return (*grads, whole[..., : bias.shape[-1]])


def _no_bias(args: Sequence[Any], result: Any) -> Any:
    """No gradient of a bias that there is not, for which the fake kernel makes a number
    (`_efficient_attention_backward`).
    """
    return (*result[:3], result[3].new_empty(0)) if args[4] is None else None


def _contiguous_first(args: Sequence[Any], result: Any) -> Any:
    """The first output contiguous whatever the input."""
    if isinstance(result, torch.Tensor):
        return None if result.is_contiguous() else _contiguous(result)
    return (
        None
        if result[0] is None or result[0].is_contiguous()
        else (_contiguous(result[0]), *result[1:])
    )


def _whole_storage(args: Sequence[Any], result: Any) -> Any:
    """A loss that stays in the storage in which every element's loss was (Loss.cu, Loss.cpp)."""
    if result.ndim or args[0].numel() <= 1:
        return None
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return result.new_empty(shape).as_strided((), ())


def _not_asked_for(args: Sequence[Any], result: Any) -> Any:
    """`log_sigmoid` keeps no buffer on CUDA (Activation.cpp)."""
    return result[0], result[1].new_empty(0)


def _as_grad(args: Sequence[Any], result: Any) -> Any:
    """The layout of the first argument, that of grad (TensorIterator, which orders by its first
    operand).
    """
    grad = args[0]
    if grad.shape != result.shape or grad.stride() == result.stride() or 0 in grad.stride():
        return None
    return torch.empty_like(grad, dtype=result.dtype)


def _power(args: Sequence[Any], result: Any) -> Any:
    """A number to the power of a tensor is contiguous (Pow.cpp)."""
    return (
        None
        if isinstance(args[0], torch.Tensor) or 0 in args[1].stride()
        else _contiguous_first(args, result)
    )


def _dropout(args: Sequence[Any], result: Any) -> Any:
    """A copy of the input where nothing is dropped (native_dropout_cuda, Dropout.cu)."""
    x, p, train = args
    return None if train is not False and p else (torch.empty_like(x), result[1])


def _weight_norm(args: Sequence[Any], result: Any) -> Any:
    """Norms in float32 for half types (WeightNorm.cu)."""
    w, norms = result
    return (w, norms.new_empty(norms.shape, dtype=torch.float32)) if is_low(norms.dtype) else None


CORRECTIONS: dict[str, Correction] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_batch_norm_with_update": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_group_norm_backward": _contiguous_first,
    "_scaled_dot_product_efficient_attention": _efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    "_efficient_attention_forward": _efficient_attention,
    "_efficient_attention_backward": _no_bias,
    "binary_cross_entropy": _whole_storage,
    "soft_margin_loss": _whole_storage,
    "mse_loss": _whole_storage,
    "smooth_l1_loss": _whole_storage,
    # `zeros_like` with LEGACY_CONTIGUOUS_MEMORY_FORMAT in Loss.cpp.
    "mse_loss_backward": _contiguous_first,
    "smooth_l1_loss_backward": _contiguous_first,
    "huber_loss_backward": _contiguous_first,
    "log_sigmoid_forward": _not_asked_for,
    "elu_backward": _as_grad,
    "hardsigmoid_backward": _as_grad,
    "hardswish_backward": _as_grad,
    "hardtanh_backward": _as_grad,
    "softplus_backward": _as_grad,
    "xlogy": _as_grad,
    "pixel_shuffle": _contiguous_first,
    "pixel_unshuffle": _contiguous_first,
    "reflection_pad2d": _contiguous_first,
    "replication_pad2d": _contiguous_first,
    "_weight_norm_interface": _weight_norm,
    "pow": _power,
    "native_dropout": _dropout,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
}
aten = torch.ops.aten
_Rule = Callable[[tuple[Any, ...], dict[str, Any], list[torch.Tensor]], list[int]]


def output_bytes(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> list[int] | None:
    """The bytes of the storages that CUDA allocates for an operator's outputs."""
    if not isinstance(outputs, (tuple, list)):
        outputs = (outputs,)
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    attention = attention_outputs(op, args, kwargs, outputs)
    if attention is not None:
        return [
            _bytes(t) if on_device else 0
            for t, (*_, on_device) in zip(tensors, attention, strict=True)
        ]
    rule = _RULES.get(op)
    return rule(args, kwargs, tensors) if rule is not None else None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any
) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _loss(reduction_index: int) -> _Rule:
    # The reduced loss is written into the storage of the unreduced one: `mse_loss_out` and its like
    # in ATen/native/Loss.cpp and cuda/Loss.cu compute it into the output, then reduce it in place.
    def rule(
        args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> list[int]:
        if _argument(args, kwargs, reduction_index, "reduction", 1) == 0:
            return [_bytes(tensors[0])]
        return [torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * tensors[0].itemsize]

    return rule


def _wide_statistics(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> list[int]:
    # CUDA keeps the mean and the deviation of half precision inputs in float32: `acc_type` in
    # layer_norm_kernel.cu and Normalization.cuh.
    return [
        _bytes(tensors[0]),
        *(t.numel() * max(t.itemsize, 4) for t in tensors[1:3]),
        *map(_bytes, tensors[3:]),
    ]


def _log_sigmoid(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> list[int]:
    # The buffer is for the CPU only: `log_sigmoid_forward_cuda`.
    return [_bytes(tensors[0]), 0]


def _col2im(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> list[int]:
    # The output begins as an empty tensor like the input: `col2im_cuda` in Col2Im.cu.
    return [max(_bytes(tensors[0]), args[0].numel() * args[0].itemsize)]


def _embedding_bag_bytes(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> list[int]:
    # `_embedding_bag_cuda` in EmbeddingBag.cu: which bag each index is in; the largest ones'
    # indices for mode max (2) only.
    indices, offsets = args[1], args[2]
    num_bags = offsets.numel() - bool(_argument(args, kwargs, 7, "include_last_offset", False))
    largest = (
        num_bags * args[0].shape[1] * indices.itemsize
        if _argument(args, kwargs, 4, "mode", 0) == 2
        else 0
    )
    return [
        _bytes(tensors[0]),
        indices.numel() * indices.itemsize,
        num_bags * indices.itemsize,
        largest,
    ]


def _efficient_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> list[int]:
    # The mask's gradient is cut from rows of a multiple of 16 elements. The cache of fake tensors
    # forgets what was cut off.
    return [_bytes(t) for t in tensors[:3]] + [
        t.shape[0] * t.stride(0) * t.itemsize for t in tensors[3:]
    ]


_RULES: dict[Any, _Rule] = {
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.mse_loss.default: _loss(2),
    aten.smooth_l1_loss.default: _loss(2),
    aten.soft_margin_loss.default: _loss(2),
    aten.binary_cross_entropy.default: _loss(3),
    aten.native_layer_norm.default: _wide_statistics,
    aten.native_batch_norm.default: _wide_statistics,
    aten.cudnn_batch_norm.default: _wide_statistics,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.col2im.default: _col2im,
    aten._embedding_bag.default: _embedding_bag_bytes,
    aten._embedding_bag_forward_only.default: _embedding_bag_bytes,
}
_aten = torch.ops.aten
#: Rows of what grouped matrix products give begin at multiples of so many bytes.
_ROW_BYTES = 16


def given_instead(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_cuda: bool
) -> torch.Tensor | None:
    """What an operator gives whose fake kernel cannot be asked; None for every operator that has
    one that can.
    """
    if (
        op is _aten.histc.default and is_cuda
    ):  # the fake kernel refuses whole numbers, as a CPU does
        return args[0].new_empty(args[1] if len(args) > 1 else kwargs.get("bins", 100))  # type: ignore[no-any-return]
    if op is _GROUPED_MM:
        return _grouped_mm(*args, **kwargs)
    return None


#: PyTorch 2.6 has none.
_GROUPED_MM = getattr(getattr(_aten, "_grouped_mm", None), "default", object())


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`create_grouped_gemm_output_tensor` (GroupedMMUtils.h): of any dtype, where the fake kernel
    knows bfloat16 alone; rows padded.
    """
    shape = [mat_a.shape[-2], mat_b.shape[-1]]
    if mat_a.dim() == mat_b.dim():
        shape.insert(0, mat_a.shape[0] if offs is None else offs.shape[0])
    dtype = out_dtype or mat_a.dtype
    multiple = _ROW_BYTES // dtype.itemsize
    padded = -(-shape[-1] // multiple) * multiple
    return mat_a.new_empty_strided(
        shape, [shape[-2] * padded, padded, 1][-len(shape) :], dtype=dtype
    )
