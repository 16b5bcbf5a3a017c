"""LSTM, GRU and RNN with cuDNN, and the fused cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from memcallback.core.tensors import lay
from memcallback.core.torch_private import storage_id
from memcallback.cuda.decompositions.layers import own_decomposition
from memcallback.cuda.decompositions.packed_sequences import packed_kernels
from memcallback.cuda.decompositions.recurrent_sizes import (
    RecurrentCall,
    dropout_state_bytes,
    reserve_bytes,
    workspace_bytes,
)
from memcallback.devices.catalogue import DeviceSpec

aten = torch.ops.aten


def flatten_rnn_weights(model: nn.Module) -> None:
    """Put each recurrent layer's weights in one buffer, as moving it to CUDA does.

    See `nn.RNNBase.flatten_parameters`.

    Call it on the fake model. Without one buffer, each forward pass copies the weights together.
    """
    for module in model.modules():
        if not isinstance(module, nn.RNNBase):
            continue
        weights = [weight for weight in module._flat_weights if isinstance(weight, torch.Tensor)]
        dtype = weights[0].dtype
        alone = (
            len({storage_id(weight.untyped_storage()) for weight in weights})
            == len(weights)
            == len(module._flat_weights)
        )
        # torch.backends.cudnn.CUDNN_TENSOR_DTYPES: bfloat16 is not in it.
        acceptable = (
            dtype in (torch.float16, torch.float32, torch.float64) and torch.backends.cudnn.enabled
        )
        if not alone or not acceptable or any(weight.dtype != dtype for weight in weights):
            continue
        with torch.no_grad():
            buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
            for weight, offset in zip(weights, _offsets(weights), strict=True):
                lay(weight, buffer.untyped_storage(), offset, _contiguous_strides(weight))


def rnn_kernels(device: DeviceSpec) -> dict[str, Callable[..., Any]]:
    """Name of a recurrent layer or cell -> its decomposition on CUDA."""
    state: list[torch.Tensor] = []

    def dropout_state(call: RecurrentCall, like: torch.Tensor) -> None:
        if call.dropout > 0 and call.train and not state:
            state.append(like.new_empty(dropout_state_bytes(device), dtype=torch.uint8))

    def run(
        kind: str,
        x: torch.Tensor,
        hidden: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        *rest: Any,
    ) -> Any:
        _, num_layers, dropout, train, bidirectional, *batch_first = rest
        hx, cx = hidden[0], hidden[1] if kind == "lstm" else None
        hidden_size = cx.shape[2] if cx is not None else hx.shape[2]
        projection = hx.shape[2] if hx.shape[2] != hidden_size else 0
        call = RecurrentCall(
            kind,
            x.shape[-1],
            hidden_size,
            projection,
            num_layers,
            dropout,
            train,
            bidirectional,
            bool(batch_first and batch_first[0]),
        )
        dropout_state(call, x)
        x, hx, cx, params = _autocast(x, hx, cx, params)
        output, hy, cy = _CudnnRNN.apply(call, x, hx, cx, *params)  # type: ignore[no-untyped-call]
        return (output, hy, cy) if kind == "lstm" else (output, hy)

    def whole(kind: str) -> Callable[..., Any]:
        def kernel(x: torch.Tensor, hx: Any, params: Any, *rest: Any) -> Any:
            if not _acceptable(x):
                return own_decomposition(f"{kind}.input")(x, hx, params, *rest)
            return run(kind, x, hx if kind == "lstm" else [hx], params, *rest)

        return kernel

    def packed(kind: str) -> Callable[..., Any]:
        def kernel(
            data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: Any, *rest: Any
        ) -> Any:
            if not _acceptable(data):
                return packed_kernels()[f"{kind}.data"](data, batch_sizes, hx, params, *rest)
            return run(kind, data, hx if kind == "lstm" else [hx], params, *rest)

        return kernel

    layers = {
        f"{kind}.{form}": make(kind)
        for kind in ("rnn_relu", "rnn_tanh", "lstm", "gru")
        for form, make in (("input", whole), ("data", packed))
    }

    def lstm_step(
        x: torch.Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        # PyTorch's fake kernel of the fused step fails without biases.
        step = (
            lstm_cell if b_ih is not None and b_hh is not None else own_decomposition("lstm_cell")
        )
        return step(x, hx, w_ih, w_hh, b_ih, b_hh)

    return {**layers, "lstm_cell": lstm_step, "gru_cell": gru_cell}


def lstm_cell(
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor,
    b_hh: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of an LSTM, fused: `LSTMCell` in ATen/native/RNN.cpp."""
    from_input = torch.matmul(input, w_ih.t())
    from_hidden = torch.matmul(hx[0], w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(from_input, from_hidden, hx[1], b_ih, b_hh)
    return hy, cy


def gru_cell(
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """A step of a GRU, fused: `GRUCell` in ATen/native/RNN.cpp."""
    from_input = torch.matmul(input, w_ih.t())
    from_hidden = torch.matmul(hx, w_hh.t())
    hy: torch.Tensor = aten._thnn_fused_gru_cell(from_input, from_hidden, hx, b_ih, b_hh)[0]
    return hy


def gru_cell_meta(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    """Outputs of `_thnn_fused_gru_cell` (`_thnn_fused_gru_cell_cuda`, RNN.cu)."""
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(
        hx.shape[0], hx.shape[1] * 5
    )


def gru_cell_backward_meta(grad_hy: Any, workspace: Any, has_bias: bool) -> Any:
    """Outputs of `_thnn_fused_gru_cell_backward` (`_thnn_fused_gru_cell_backward_cuda`, RNN.cu)."""
    batch, hidden = workspace.shape[0], workspace.shape[1] // 5
    gates = [workspace.new_empty(batch, hidden * 3) for _ in range(2)]
    biases = [workspace.new_empty(hidden * 3) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad_hy, memory_format=torch.contiguous_format), *biases)


class _CudnnRNN(torch.autograd.Function):
    """The allocations of `_cudnn_rnn` and `_cudnn_rnn_backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        call: RecurrentCall,
        x: torch.Tensor,
        hx: torch.Tensor,
        cx: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> Any:
        out_size = (call.proj_size or call.hidden_size) * call.num_directions
        with_time_first = x.transpose(0, 1) if call.batch_first else x
        num_tokens = x.numel() // x.shape[-1]
        dense = with_time_first.contiguous()
        flat = _is_flat(weights)
        buffer = None if flat else weights[0].new_zeros(sum(weight.numel() for weight in weights))
        output = x.new_empty(*with_time_first.shape[:-1], out_size)
        hy = hx.new_empty(hx.shape)
        cy = cx.new_empty(cx.shape) if cx is not None else x.new_empty(0)
        workspace = x.new_empty(
            workspace_bytes(call, num_tokens, hx.shape[1], x.dtype), dtype=torch.uint8
        )
        reserve = x.new_empty(reserve_bytes(call, num_tokens, x.itemsize), dtype=torch.uint8)
        del dense, workspace
        output = output.transpose(0, 1) if call.batch_first else output
        ctx.call, ctx.num_weights = call, len(weights)
        ctx.set_materialize_grads(False)
        if cx is None:
            ctx.mark_non_differentiable(cy)
        ctx.save_for_backward(x, hx, cx, output, reserve, buffer, *weights)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, grad_output: Any, grad_hy: Any, grad_cy: Any) -> Any:
        call: RecurrentCall = ctx.call
        x, hx, cx, output, reserve, buffer, *weights = ctx.saved_tensors
        del reserve, buffer
        if grad_output is None and grad_hy is None and grad_cy is None:
            return (None,) * (4 + len(weights))
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        grad_hy = torch.zeros_like(hx) if grad_hy is None else grad_hy
        grad_cy = torch.zeros_like(cx) if grad_cy is None and cx is not None else grad_cy
        first = x.transpose(0, 1) if call.batch_first else x
        num_tokens = x.numel() // x.shape[-1]
        dense = first.contiguous()
        grad_x, grad_hx = first.new_empty(first.shape), hx.new_empty(hx.shape)
        grad_cx = None if cx is None else cx.new_empty(cx.shape)
        size = workspace_bytes(call, num_tokens, hx.shape[1], x.dtype)
        workspace = x.new_empty(size, dtype=torch.uint8)
        del workspace
        # cuDNN computes the gradients of the input and of the weights in two calls.
        grad_weights = weights[0].new_zeros(sum(weight.numel() for weight in weights))
        workspace = x.new_empty(size, dtype=torch.uint8)
        del workspace, dense
        views = [
            grad_weights.as_strided(weight.size(), _contiguous_strides(weight), offset)
            for weight, offset in zip(weights, _offsets(weights), strict=True)
        ]
        return (
            None,
            grad_x.transpose(0, 1) if call.batch_first else grad_x,
            grad_hx,
            grad_cx,
            *views,
        )


def _acceptable(x: torch.Tensor) -> bool:
    # cudnn_is_acceptable in ATen/native/cudnn, as `use_cudnn` of the recurrent layers calls it
    return torch.backends.cudnn.enabled and x.numel() > 0 and x.is_floating_point()


def _autocast(
    x: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor | None, params: Sequence[torch.Tensor]
) -> Any:
    # _cudnn_rnn_cast_reflatten in ATen/cudnn/AutocastRNN.cpp: the weights are cast into one new
    # buffer, at every call
    device = next((name for name in ("cuda", "cpu") if torch.is_autocast_enabled(name)), None)
    if device is None or x.dtype == torch.float64:
        return x, hx, cx, params
    dtype = torch.get_autocast_dtype(device)
    if params[0].dtype != dtype:
        buffer = torch.zeros(sum(weight.numel() for weight in params), dtype=dtype, device=x.device)
        cast = []
        for weight, offset in zip(params, _offsets(params), strict=True):
            # For autograd it is no view of the buffer, as in PyTorch.
            piece = buffer.as_strided(weight.size(), _contiguous_strides(weight), offset).detach()
            cast.append(piece.copy_(weight))
        params = cast
    return x.to(dtype), hx.to(dtype), cx.to(dtype) if cx is not None else None, params


def _is_flat(weights: Sequence[torch.Tensor]) -> bool:
    # try_get_weight_buf
    storages = {storage_id(weight.untyped_storage()) for weight in weights}
    return len(storages) == 1 and weights[0].untyped_storage().nbytes() == sum(
        weight.nbytes for weight in weights
    )


def _offsets(weights: Sequence[torch.Tensor]) -> list[int]:
    """Where each weight begins in the buffer, in elements: all matrices, then all biases."""
    order = sorted(range(len(weights)), key=lambda index: weights[index].dim() < 2)
    begins = accumulate((weights[index].numel() for index in order), initial=0)
    where = dict(zip(order, begins, strict=False))
    return [where[index] for index in range(len(weights))]


def _contiguous_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return (tensor.shape[1], 1) if tensor.dim() == 2 else (1,)
