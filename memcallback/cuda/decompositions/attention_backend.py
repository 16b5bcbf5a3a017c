"""Which backend CUDA chooses for scaled_dot_product_attention.

Checked on PyTorch 2.11; comments name what differs in 2.12 and 2.13.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from memcallback.core.tensors import torch_version
from memcallback.core.torch_private import DisableTorchFunction, attention_priorities, no_dispatch
from memcallback.devices.catalogue import DeviceSpec

#: The order in which a CUDA build tries them: `sdp_priority_order` in ATen/Context.h.
_DEFAULT_ORDER = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)
_HALVES = (torch.float16, torch.bfloat16)
#: The CUDA 13 builds of PyTorch 2.11 to 2.13 bring 9.19 or newer; used where this build has none.
_CUDNN_VERSION = 91900


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of `scaled_dot_product_attention`.

    Attributes:
        query: Queries.
        key: Keys.
        value: Values.
        attn_mask: Boolean, or added to the scores.
        dropout_p: Probability of dropping a weight.
        is_causal: Whether a position attends only to earlier ones.
        scale: Factor of the scores.
        enable_gqa: Whether several heads of the query may share one of the key.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def needs_grad(self) -> bool:
        """Whether autograd needs a gradient of query, key or value."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


def scale_of(query: torch.Tensor, scale: float | None) -> float:
    """The factor of the scores: `calculate_scale` in sdp_utils_cpp.h."""
    return scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])


def choose_backend(call: AttentionCall, device: DeviceSpec) -> SDPBackend:
    """The backend that CUDA chooses, under the current flags."""
    usable: dict[SDPBackend, Callable[[AttentionCall, DeviceSpec], bool]] = {
        SDPBackend.FLASH_ATTENTION: _flash,
        SDPBackend.EFFICIENT_ATTENTION: _efficient,
        SDPBackend.CUDNN_ATTENTION: _cudnn,
        SDPBackend.MATH: lambda call, device: torch.backends.cuda.math_sdp_enabled(),
    }
    for backend in _order(device):
        if backend in usable and usable[backend](call, device):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def jagged_choices(device: DeviceSpec) -> dict[str, Callable[..., bool]]:
    """The checks of a CUDA build for nested tensors (torch/nested/_internal/sdpa.py).

    PyTorch chooses their backend in Python.
    """

    def asked(usable: Callable[[AttentionCall, DeviceSpec], bool]) -> Callable[..., bool]:
        def answer(params: Any, debug: bool = False) -> bool:
            query, key, value = (
                _as_dense(tensor) for tensor in (params.query, params.key, params.value)
            )
            return usable(
                AttentionCall(
                    query, key, value, params.attn_mask, params.dropout, params.is_causal
                ),
                device,
            )

        return answer

    return {
        "can_use_flash_attention": asked(_flash),
        "can_use_efficient_attention": asked(_efficient),
    }


def _as_dense(tensor: Any) -> torch.Tensor:
    """A nested tensor as (batch, heads, 1, size): the checks do not need the lengths."""
    values = tensor._values
    with no_dispatch(), DisableTorchFunction():
        dense = torch.empty(
            tensor.shape[0], values.shape[0], 1, values.shape[2], dtype=values.dtype, device="meta"
        )
    return dense.requires_grad_(tensor.requires_grad)


def _order(device: DeviceSpec) -> tuple[SDPBackend, ...]:
    order = tuple(SDPBackend(number) for number in attention_priorities())
    order = tuple(backend for backend in order if backend in _DEFAULT_ORDER)
    if order == _DEFAULT_ORDER and _prefers_cudnn(device):
        return (SDPBackend.CUDNN_ATTENTION, *_DEFAULT_ORDER[:-1])
    return order


def _prefers_cudnn(device: DeviceSpec) -> bool:
    # check_prefer_cudnn_attention; CUDA 13 builds of PyTorch after 2.13 take every minor version
    major, minor = device.compute_capability
    wanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    return wanted and major in (9, 10) and minor in (0, 3) and _cudnn_version() > 91500


def _cudnn_version() -> int:
    """The version of cuDNN; ask for a card that it supports alone: PyTorch refuses others."""
    if not torch.backends.cuda.is_built():
        return _CUDNN_VERSION
    version: int | None = torch.backends.cudnn.version()
    return version or _CUDNN_VERSION


def _flash(call: AttentionCall, device: DeviceSpec) -> bool:
    # can_use_flash_attention
    size = call.query.shape[-1]
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and _four_dimensions(call)
        and call.attn_mask is None
        and size == call.key.shape[-1] == call.value.shape[-1]
        and size <= 256
        and (8, 0) <= device.compute_capability <= (12, 1)
        and _head_size_has_backward(call, device)
        and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
        and _one_dtype(call, _HALVES)
        and _same_batch_and_heads(call, grouped=True)
        and _lengths_above_zero(call)
        and _dense_last_dimension(call, or_of_size_one=True)
    )


def _head_size_has_backward(call: AttentionCall, device: DeviceSpec) -> bool:
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    capability = device.compute_capability
    if not call.needs_grad or not (
        (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    ):
        return True
    size = call.query.shape[-1]
    return size <= 192 or (size > 224 and call.dropout_p == 0.0)


def _efficient(call: AttentionCall, device: DeviceSpec) -> bool:
    # can_use_mem_efficient_attention
    sizes = (call.query.shape[-1], call.value.shape[-1])
    alignment = _gemm_alignment(call.query.dtype, device)
    dtypes = (
        (*_HALVES, torch.float32)
        if device.compute_capability >= (8, 0)
        else (torch.float16, torch.float32)
    )
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and (5, 0) <= device.compute_capability <= (12, 1)
        and _four_dimensions(call)
        and sizes[0] == call.key.shape[-1]
        and all(size > 0 and size % alignment == 0 for size in sizes)
        and (
            torch_version() < (2, 13)
            or device.compute_capability < (8, 0)
            or _aligned(call, alignment)
        )
        and _lengths_above_zero(call)
        and _dense_last_dimension(call, or_of_size_one=False)
        and _same_batch_and_heads(call, grouped=False)
        and _one_dtype(call, dtypes)
    )


def _aligned(call: AttentionCall, alignment: int) -> bool:
    # check_data_ptr_alignment_mem_efficient: since 2.13
    return all(
        tensor.storage_offset() % alignment == 0 for tensor in call.tensors if tensor.numel()
    )


def _gemm_alignment(dtype: torch.dtype, device: DeviceSpec) -> int:
    # minimum_gemm_alignment
    major = device.compute_capability[0]
    half = dtype in _HALVES
    tensor_cores = major >= 8 or (major == 7 and half)
    alignment = 4 if major >= 8 else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def _cudnn(call: AttentionCall, device: DeviceSpec) -> bool:
    # can_use_cudnn_attention
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and (8, 0) <= device.compute_capability <= (12, 1)
        and not (call.dropout_p > 0.0 and 91100 < _cudnn_version() < 91400)
        and _four_dimensions(call)
        and not (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        and _one_dtype(call, _HALVES)
        and _mask_shape_fits(call)
        # check_cudnn_dropout: since 2.12, https://github.com/pytorch/pytorch/pull/174245
        and (torch_version() < (2, 12) or (call.dropout_p * 16).is_integer())
        and _lengths_above_zero(call)
        and _dense_last_dimension(call, or_of_size_one=True)
        and _same_batch_and_heads(call, grouped=True, same_key_and_value=False)
        and _cudnn_shapes(call, device)
    )


def _cudnn_shapes(call: AttentionCall, device: DeviceSpec) -> bool:
    # check_cudnn_tensor_shapes
    size, value_size = call.query.shape[3], call.value.shape[3]
    limit = 128
    if device.compute_capability == (9, 0):
        limit = 256
    elif device.compute_capability[0] == 10 and (size, value_size) == (192, 128):
        limit = 192
    most = 65535 if torch_version() >= (2, 13) else 2**31
    return (
        all(size <= most for size in call.query.shape[:2])
        and max(size, value_size) <= limit
        and size % 8 == value_size % 8 == 0
        and call.key.shape[2] != 1
        and not (call.query.shape[2] == 1 and call.dropout_p != 0.0)
    )


def _mask_shape_fits(call: AttentionCall) -> bool:
    # check_attn_mask_shape
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    batch, heads, length, _ = call.query.shape
    whole = (batch, heads, length, call.key.shape[2])
    return all(
        size in (1, full) for size, full in zip(mask.shape, whole[-mask.dim() :], strict=True)
    )


def _four_dimensions(call: AttentionCall) -> bool:
    return all(tensor.dim() == 4 for tensor in call.tensors)


def _one_dtype(call: AttentionCall, dtypes: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in dtypes


def _lengths_above_zero(call: AttentionCall) -> bool:
    return call.query.shape[-2] > 0 and call.key.shape[-2] > 0


def _dense_last_dimension(call: AttentionCall, *, or_of_size_one: bool) -> bool:
    # check_last_dim_stride_equals_1_dense
    dense = all(tensor.stride(-1) == 1 for tensor in call.tensors) or (
        or_of_size_one and call.query.shape[-1] == 1
    )
    return dense and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)


def _same_batch_and_heads(
    call: AttentionCall, *, grouped: bool, same_key_and_value: bool = True
) -> bool:
    # check_batch_size_and_num_heads_dense, check_grouped_query_attention
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return False
    heads, key_heads, value_heads = (tensor.shape[-3] for tensor in call.tensors)
    if not (call.enable_gqa and grouped):
        return heads == key_heads == value_heads
    if same_key_and_value and key_heads != value_heads:
        return False
    return heads % key_heads == 0 and (same_key_and_value or heads % value_heads == 0)
