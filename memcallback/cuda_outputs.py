"""What CUDA's kernels allocate for an operator's outputs, where PyTorch's fake kernels say otherwise.

Seen by running each operator in PyTorch 2.11's CUDA build and comparing the sizes of the outputs' storages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memcallback.cuda_attention import attention_outputs

aten = torch.ops.aten

_Rule = Callable[[tuple[Any, ...], dict[str, Any], list[torch.Tensor]], list[int]]


def output_bytes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> list[int] | None:
    """The bytes of the storages that CUDA allocates for an operator's outputs.

    Args:
        op: The operator below autograd.
        args: Its arguments.
        kwargs: Its keyword arguments.
        outputs: What its fake kernel returned.

    Returns:
        The size of each output's storage on the device, in order, 0 for what CUDA leaves on the host or does not make; None for
        every operator for which the fake kernel is right.
    """
    if not isinstance(outputs, (tuple, list)):
        outputs = (outputs,)
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    attention = attention_outputs(op, args, kwargs, outputs)
    if attention is not None:
        return [_bytes(t) if on_device else 0 for t, (*_, on_device) in zip(tensors, attention, strict=True)]
    rule = _RULES.get(op)
    return rule(args, kwargs, tensors) if rule is not None else None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _loss(reduction_index: int) -> _Rule:
    # The reduced loss is written into the storage of the unreduced one: `mse_loss_out` and its like in ATen/native/Loss.cpp and
    # cuda/Loss.cu compute it into the output, then reduce it in place.
    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> list[int]:
        if _argument(args, kwargs, reduction_index, "reduction", 1) == 0:
            return [_bytes(tensors[0])]
        return [torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * tensors[0].itemsize]

    return rule


def _wide_statistics(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> list[int]:
    # CUDA keeps the mean and the deviation of half precision inputs in float32: `acc_type` in layer_norm_kernel.cu and Normalization.cuh.
    return [_bytes(tensors[0]), *(t.numel() * max(t.itemsize, 4) for t in tensors[1:3]), *map(_bytes, tensors[3:])]


def _log_sigmoid(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> list[int]:
    # The buffer is for the CPU only: `log_sigmoid_forward_cuda`.
    return [_bytes(tensors[0]), 0]


def _col2im(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> list[int]:
    # The output begins as an empty tensor like the input: `col2im_cuda` in Col2Im.cu.
    return [max(_bytes(tensors[0]), args[0].numel() * args[0].itemsize)]


def _embedding_bag(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> list[int]:
    # `_embedding_bag_cuda` in EmbeddingBag.cu: which bag each index is in; the largest ones' indices for mode max (2) only.
    indices, offsets = args[1], args[2]
    num_bags = offsets.numel() - bool(_argument(args, kwargs, 7, "include_last_offset", False))
    largest = num_bags * args[0].shape[1] * indices.itemsize if _argument(args, kwargs, 4, "mode", 0) == 2 else 0
    return [_bytes(tensors[0]), indices.numel() * indices.itemsize, num_bags * indices.itemsize, largest]


def _efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> list[int]:
    # The mask's gradient is cut from rows of a multiple of 16 elements. The cache of fake tensors forgets what was cut off.
    return [_bytes(t) for t in tensors[:3]] + [t.shape[0] * t.stride(0) * t.itemsize for t in tensors[3:]]


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
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
}
