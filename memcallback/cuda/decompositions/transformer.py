"""The fused operators of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, decomposed.

PyTorch calls them in evaluation mode where autograd records nothing. Follows
`native_multi_head_attention_cuda` in ATen/native/transformers/cuda/attention.cu, and
`transformer_encoder_layer_forward` in ATen/native/transformers/transformer.cpp, of PyTorch 2.11.
Composite operators would not be decomposed here, below autograd: there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from memcallback.cuda.decompositions.attention import scaled_dot_product_attention
from memcallback.cuda.decompositions.attention_backend import AttentionCall, choose_backend
from memcallback.cuda.decompositions.layers import own_decomposition
from memcallback.cuda.op_call import OpCall
from memcallback.devices.catalogue import DeviceSpec

_aten = torch.ops.aten
_FUSED = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
)


def transformer_decomposition(call: OpCall) -> Callable[..., Any] | None:
    """The decomposition of a fused operator on a card; None for any other operator."""
    decomposition = _DECOMPOSITIONS.get(call.name)
    if decomposition is None or call.card is None:
        return None
    return partial(decomposition, call.card)


def _attention(
    device: DeviceSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`_native_multi_head_attention`, which PyTorch calls with one tensor in three places."""
    size = embed_dim // num_head

    def heads(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(tensor.shape[0], -1, num_head, size).transpose(1, 2)

    unprojected = heads(query)
    if size % 8 == 0 and not need_weights and mask is None:
        backend = choose_backend(AttentionCall(*(unprojected,) * 3), device)
        if backend in _FUSED:
            projected = _linear(query, qkv_weight, qkv_bias)
            q, k, v = map(heads, _aten.split(projected, embed_dim, -1))
            attended = scaled_dot_product_attention(q, k, v, device=device)
            # A view: the heads of each position are side by side.
            joined = attended.transpose(1, 2).view(query.shape)
            return _linear(joined, proj_weight, proj_bias), None
    # Products and a softmax; _transform_bias_rescale_qkv makes one tensor for all three.
    batch, length, _ = query.shape
    qkv = _product(query, qkv_weight)
    parts = qkv.new_empty(3, batch * num_head, length, size)
    del qkv
    q, k, v = _aten.unbind(parts)
    weights = torch.bmm(q, k.transpose(1, 2)).view(batch, num_head, length, length)
    if mask is None:
        _aten._softmax.out(weights, -1, False, out=weights)
    else:
        mask = mask if mask.dtype is torch.bool else mask.to(torch.bool)
        weights = _aten._masked_softmax(weights, mask, weights.dim() - 1, mask_type)
        del mask
    torch.bmm(weights.view(-1, length, length), v, out=q)  # overwrites the queries
    kept: torch.Tensor | None = weights if need_weights else None
    del weights
    context = q.view(batch, num_head, length, size).permute(0, 2, 1, 3)
    context = _aten.clone(context, memory_format=torch.contiguous_format)
    output = _linear(context.view(query.shape), proj_weight, proj_bias)
    del context
    if kept is not None and average_attn_weights:
        kept = kept.sum(1)
        kept /= num_head
    return output, kept


_matmul = own_decomposition("matmul")


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # `should_fold` in ATen/native/LinearAlgebra.cpp: a copy, if the transposed weight needs a
    # gradient. Below autograd a transposed tensor needs none, but inference mode does not go there.
    if torch.is_inference_mode_enabled() and weight.requires_grad and not x.is_contiguous():
        folded = _aten.clone(x, memory_format=torch.contiguous_format).view(-1, x.shape[-1])
        return torch.mm(folded, weight.t()).view(*x.shape[:-1], len(weight))
    product: torch.Tensor = _matmul(x, weight.t())
    return product


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        return _product(x, weight).add_(bias)
    output = torch.addmm(bias, x.view(-1, x.shape[-1]), weight.t())
    return output.view(*x.shape[:-1], len(weight))


def _encoder_layer(
    device: DeviceSpec,
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """`_transformer_encoder_layer_fwd`; its residual additions are in place."""

    def norm_1(x: torch.Tensor) -> torch.Tensor:
        return _layer_norm(x, norm_weight_1, norm_bias_1, eps)

    def norm_2(x: torch.Tensor) -> torch.Tensor:
        return _layer_norm(x, norm_weight_2, norm_bias_2, eps)

    x = norm_1(src) if norm_first else src
    x = _aten._native_multi_head_attention(
        *(x, x, x, embed_dim, num_heads),
        *(qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type),
    )[0]
    x.add_(src)
    if not norm_first:
        x = norm_1(x)
    before = x
    if norm_first:
        x = norm_2(x)
    hidden = _aten._addmm_activation(
        ffn_bias_1, x.view(-1, embed_dim), ffn_weight_1.t(), use_gelu=use_gelu
    )
    x = _linear(hidden, ffn_weight_2, ffn_bias_2).view(src.shape)
    del hidden
    x.add_(before)
    return x if norm_first else norm_2(x)


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    output: torch.Tensor = _aten.native_layer_norm(x, weight.shape, weight, bias, eps)[0]
    return output


_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": _attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
