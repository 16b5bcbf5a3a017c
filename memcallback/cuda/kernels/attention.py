"""Kernels of scaled dot product attention."""

from __future__ import annotations

import math

import torch

from memcallback.core.kernel import Kernel
from memcallback.core.types import Category
from memcallback.core.units import round_up
from memcallback.cuda.op_call import KernelBuilder, OpCall, Rule, dense_bytes


def _flash(call: OpCall) -> Kernel:
    """`mha_fwd` (flash_api.cpp).

    With dropout, the generator's state is allocated twice and the first one freed. Without, the
    keys are split where batch and heads are too few to fill the card: each part has its own output
    and logsumexp in float32.
    """
    scaled = call.name.startswith("_scaled")
    q, k = call.arguments[:2]
    kernel = KernelBuilder()
    kernel.output(0, 1)
    if call.arguments[3 if scaled else 7]:
        unused = kernel.alloc(16)
        kernel.output(3, 2)
        kernel.free(unused)
        return kernel.build()
    if q.ndim == 3:  # packed sequences, `mha_varlen_fwd`
        kernel.output(*range(2, len(call.outputs)))
        return kernel.build()
    layout = (0, 2, 1, 3) if scaled else (0, 1, 2, 3)
    batch, length, heads, size = (q.shape[i] for i in layout)
    numbers = (batch, heads, length, k.shape[layout[1]])
    sums = kernel.alloc(flash_split_bytes(call.device.num_multiprocessors, size, 1, *numbers))
    columns = round_up(size, 32) if size <= 192 else 256
    parts = kernel.alloc(
        flash_split_bytes(call.device.num_multiprocessors, size, columns, *numbers)
    )
    kernel.output(*range(2, len(call.outputs)))
    kernel.free(sums, parts)
    return kernel.build()


def flash_split_bytes(
    num_multiprocessors: int,
    size: int,
    columns: int,
    batch: int,
    heads: int,
    length: int,
    length_kv: int,
) -> int:
    """Size of the parts of split keys, 0 for one part (`num_splits_heuristic`, flash_api.cpp)."""
    num_keys = -(-length_kv // (256 if size <= 64 else 128 if size <= 128 else 64))
    work, room = batch * heads * -(-length // 64), 2 * num_multiprocessors
    if work >= 0.8 * room:
        return 0
    efficiency = {}
    for n in range(1, min(128, room, num_keys) + 1):
        if n == 1 or -(-num_keys // n) != -(-num_keys // (n - 1)):
            waves = work * n / room
            efficiency[n] = waves / math.ceil(waves) if waves else 0.0
    best = max(efficiency.values(), default=0.0)
    splits = next((n for n, value in efficiency.items() if value >= 0.85 * best), 1)
    return splits * batch * heads * length * columns * 4 if splits > 1 else 0


def _flash_backward(call: OpCall) -> Kernel:
    """`mha_bwd` (flash_api.cpp).

    Copies of gradient and output, `softmax_d`, `dq_accum`, gradients of repeated heads.

    Sequences are rounded up to 128, head sizes to 32 (above 192: 256).
    """
    grad, q, k, _, out = call.arguments[:5]
    if q.ndim == 3:
        return _flash_varlen_backward(call)
    scaled = call.name.startswith("_scaled")
    kernel = KernelBuilder()
    layout = (0, 2, 1, 3) if scaled else (0, 1, 2, 3)
    copies = [
        None if t.permute(layout).is_contiguous() else kernel.alloc(dense_bytes(t))
        for t in (grad, out)
    ]
    batch, length, heads, size = (q.shape[i] for i in layout)
    heads_kv = k.shape[1 if scaled else 2]
    kernel.output(0, 1, 2)
    rounded_size = round_up(size, 32) if size <= 192 else 256
    temps = [
        kernel.alloc(padded_bytes(128, 4 * columns, batch, heads, length))
        for columns in (1, rounded_size)
    ]
    if heads != heads_kv:
        repeated = batch * k.shape[2 if scaled else 1] * heads * size * k.element_size()
        temps += [kernel.alloc(repeated), kernel.alloc(repeated)]
    kernel.free(*reversed(temps), *reversed(copies))
    return kernel.build()


def _flash_varlen_backward(call: OpCall) -> Kernel:
    """`mha_varlen_bwd` (flash_api.cpp): `mha_bwd` for packed sequences, 128 more rows for each."""
    grad, q, k, _, out = call.arguments[:5]
    kernel = KernelBuilder()
    copies = [kernel.alloc_copy(tensor) for tensor in (grad, out)]
    kernel.output(0, 1, 2)
    total, heads, size = q.shape
    rows = total + 128 * (call.arguments[6].shape[0] - 1)
    temps = [
        kernel.alloc(rows * heads * columns * 4)
        for columns in (1, round_up(size, 32) if size <= 192 else 256)
    ]
    if heads != k.shape[1]:
        temps += [kernel.alloc(k.shape[0] * heads * size * k.element_size()) for _ in range(2)]
    kernel.free(*reversed(temps), *reversed(copies))
    return kernel.build()


def padded_bytes(multiple: int, row_bytes: int, batch: int, heads: int, length: int) -> int:
    """Size of one row per query, with the rows of each head rounded up to a multiple."""
    return batch * heads * round_up(length, multiple) * row_bytes


def _efficient(call: OpCall) -> Kernel:
    """`_efficient_attention_forward` (attention.cu).

    Half types with values of more than 128 elements are summed in float32.

    Each head's logsumexp is rounded up to 32 (`kAlignLSE`, kernel_forward.h).
    """
    q, v, sums = call.arguments[0], call.arguments[2], call.outputs[1]
    kernel = KernelBuilder()
    kernel.output(0)
    is_scaled = call.name.startswith("_scaled")
    keeps_sums = call.arguments[4 if is_scaled else 10]  # compute_log_sumexp
    if keeps_sums:
        batch, heads, length = (q.shape[i] for i in ((0, 1, 2) if is_scaled else (0, 2, 1)))
        if (
            not is_scaled and call.arguments[4] is not None
        ):  # packed sequences, with a largest length
            batch, length = call.arguments[4].shape[0] - 1, call.arguments[6]
        kernel.sized_output(1, padded_bytes(32, sums.element_size(), batch, heads, length))
    kernel.output(*range(2 if keeps_sums else 1, len(call.outputs)))
    if q.dtype == torch.float32 or v.shape[-1] <= 128:
        return kernel.build()
    kernel.free(kernel.alloc(q.numel() // q.shape[-1] * v.shape[-1] * 4))
    return kernel.build()


def _efficient_backward(call: OpCall) -> Kernel:
    """`_efficient_attention_backward` (attention_backward.cu): a gradient copy, delta, a workspace.

    The sizes are those of kernel_backward.h.

    The workspace holds a block of accumulators, a lock and a counter for each block of queries and
    columns; for half types whose gradients do not fit the registers, also those of keys and values.
    """
    grad, q, k, v, _, _out = call.arguments[:6]
    major, _minor = call.device.compute_capability
    kernel = KernelBuilder()
    is_scaled = call.name.startswith("_scaled")
    copy = (
        None
        if (grad.transpose(1, 2) if is_scaled else grad).is_contiguous()
        else kernel.alloc(dense_bytes(grad))
    )
    batch, heads, length, size = (q.shape[i] for i in ((0, 1, 2, 3) if is_scaled else (0, 2, 1, 3)))
    kernel.output(*range(len(call.outputs)))
    low = q.dtype != torch.float32
    largest = max(size, v.shape[-1])
    if largest <= 64 or (not low and major < 8):
        rows, columns = 64, 64
    elif low and largest <= 128 and major >= 8:
        rows, columns = 128, 128
    else:
        rows, columns = 128, 64
    in_registers = low and largest <= rows
    delta_bytes = batch * heads * length * 4
    if low:
        delta, product = kernel.alloc(delta_bytes), None
    else:
        product = kernel.alloc(batch * heads * length * v.shape[-1] * 4)
        total = kernel.alloc(delta_bytes)
        if length == 1 or heads == 1:
            delta = total
        else:
            delta = kernel.alloc(delta_bytes)
            kernel.free(total)
        kernel.free(product)
    block = min(columns, 64) if not low or largest > 128 else columns
    numbers = (batch, heads, length, k.shape[2 if is_scaled else 1])
    if not is_scaled and call.arguments[6] is not None:  # packed sequences, with largest lengths
        numbers = (call.arguments[6].shape[0] - 1, heads, call.arguments[8], call.arguments[9])
    constants = (rows, block, 64, size, v.shape[-1], low and not in_registers)
    workspace = kernel.alloc(efficient_workspace_bytes(*constants, *numbers))
    kernel.free(delta, workspace, copy)
    return kernel.build()


def efficient_workspace_bytes(
    rows: int,
    columns: int,
    keys_per_block: int,
    size: int,
    size_v: int,
    stages: bool,
    batch: int,
    heads: int,
    length: int,
    length_kv: int,
) -> int:
    """`AttentionBackwardKernel::Params::workspace_size` of kernel_backward.h."""
    elements = -(-length // rows) * -(-size // columns) * (4 + rows * columns)
    if stages:
        splits = -(-length_kv // keys_per_block)
        splits = max(min(splits, 200 // max(batch * heads, 1)), 1)
        elements += splits * keys_per_block * (round_up(size, rows) + round_up(size_v, rows))
    return batch * heads * round_up(elements, 4) * 4


def _cudnn(call: OpCall) -> Kernel:
    """`_scaled_dot_product_cudnn_attention` (attention.cu).

    Seed and offset, output, logsumexp, cuDNN's workspace.

    Workspace of cuDNN 9.19 at compute capability 9.0: none for one query, else 256 B.
    """
    kernel = KernelBuilder()
    kernel.output(*range(2, len(call.outputs)), 0, 1)
    if call.arguments[0].shape[2] > 1:
        kernel.free(kernel.alloc(256, Category.WORKSPACE))
    return kernel.build()


def _cudnn_backward(call: OpCall) -> Kernel:
    """`_scaled_dot_product_cudnn_attention_backward` (attention_backward.cu).

    The gradients, a copy of the output's gradient if its last dimension is not dense, as that of
    a sum is (`run_cudnn_SDP_bprop` in MHA.cpp), and cuDNN's workspace.

    Workspace of cuDNN 9.19 at compute capability 9.0: the query's gradient and one sum per query in
    float32, and 256 B; where heads share keys and values, also the gradients of these per head.
    """
    gradient, q, k, v = call.arguments[:4]
    kernel = KernelBuilder()
    kernel.output(*range(len(call.outputs)))
    copy = kernel.alloc(dense_bytes(gradient)) if gradient.stride(-1) != 1 else None
    workspace_bytes = q.numel() * 4 + math.prod(q.shape[:-1]) * 4 + 256
    if k.shape[1] < q.shape[1]:
        workspace_bytes += sum(dense_bytes(t) // t.shape[1] * q.shape[1] for t in (k, v))
    kernel.free(kernel.alloc(workspace_bytes, Category.WORKSPACE))
    if copy is not None:
        kernel.free(copy)
    return kernel.build()


RULES: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_flash_attention_forward": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_efficient_attention_forward": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
