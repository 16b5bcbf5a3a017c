"""scaled_dot_product_attention, decomposed for the backend that CUDA chooses.

Follows PyTorch: `scaled_dot_product_attention` in
ATen/native/transformers/attention.cpp, `select_sdp_backend` in
ATen/native/transformers/cuda/sdp_utils.cpp, the checks in ATen/native/transformers/sdp_utils_cpp.h.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from memcallback.cuda.decompositions.attention_backend import (
    AttentionCall,
    choose_backend,
    scale_of,
)
from memcallback.devices.catalogue import DeviceSpec

aten = torch.ops.aten


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    device: DeviceSpec,
) -> torch.Tensor:
    """Run attention with the operators that CUDA calls below autograd."""
    if not query.dtype is key.dtype is value.dtype:  # `validate_sdpa_input`
        raise RuntimeError(
            "Attention needs query, key and value of the same dtype, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    backend = choose_backend(call, device)
    mask = _added_mask(attn_mask, query.dtype)
    keep = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    if backend == SDPBackend.CUDNN_ATTENTION:
        return _first(
            aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, keep, dropout_p, is_causal, False, scale=scale
            )
        )
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        mask = None if mask is None else _aligned_mask(mask, query, key)
        return _first(
            aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, keep, dropout_p, is_causal, scale=scale
            )
        )
    if backend == SDPBackend.FLASH_ATTENTION:
        padded = [_padded(tensor, 8) for tensor in (query, key, value)]
        factor = scale_of(query, scale)
        output = _first(
            aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, False, scale=factor
            )
        )
        size = query.shape[-1]
        return output if output.shape[-1] == size else aten.slice(output, -1, 0, size)
    return _math(call, mask)


def _first(outputs: Any) -> torch.Tensor:
    output: torch.Tensor = outputs[0]
    return output


def _added_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    # convert_boolean_attn_mask
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero, lowest = (
        aten.scalar_tensor(number, dtype=dtype, device=mask.device) for number in (0.0, -math.inf)
    )
    return torch.where(mask, zero, lowest)


def _aligned_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    # preprocess_mask
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        size = mask.shape[-1]
        mask = aten.slice(aten.constant_pad_nd(mask, [0, 8 - size % 8]), -1, 0, size)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    # pad_last_dim
    rest = tensor.shape[-1] % multiple
    return aten.constant_pad_nd(tensor, [0, multiple - rest]) if rest else tensor


def _math(call: AttentionCall, mask: torch.Tensor | None) -> torch.Tensor:
    # _scaled_dot_product_attention_math. PyTorch's own body would not add the mask in place under a
    # TorchDispatchMode.
    widen = not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    wide_query, key, value = (
        tensor.to(torch.float32)
        if widen and tensor.dtype in (torch.float16, torch.bfloat16)
        else tensor
        for tensor in (call.query, call.key, call.value)
    )
    negative = call.scale is not None and call.scale < 0.0
    factor = math.sqrt(scale_of(wide_query, abs(call.scale) if call.scale is not None else None))
    query = aten.mul.Scalar(wide_query, -factor if negative else factor)
    if call.is_causal:
        mask = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()
        mask = _added_mask(mask, query.dtype)
    if call.enable_gqa:
        key, value = _repeated_heads(query, key, value)
    scores = torch.matmul(query, aten.mul.Scalar(key.transpose(-2, -1), factor))
    if mask is not None:
        scores.add_(mask)
    weights = aten._safe_softmax(scores, -1)
    del scores
    if call.dropout_p > 0.0:
        weights = torch.dropout(weights, call.dropout_p, True)
    # C++ leaves the order of a tuple's elements open; compilers make the second one first, and both
    # live until it is there.
    second = weights.to(call.query.dtype)
    output = torch.matmul(weights, value).to(call.query.dtype)
    del second
    return output


def _repeated_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # pre_process_group_query_attention_input
    heads = query.shape[-3]
    if heads == key.shape[-3] == value.shape[-3]:
        return key, value
    return key.repeat_interleave(heads // key.shape[-3], -3), value.repeat_interleave(
        heads // value.shape[-3], -3
    )
