"""Kernels of losses: unreduced intermediates, and their reductions."""

from __future__ import annotations

import math

import torch

from memcallback.core.kernel import Kernel
from memcallback.cuda.kernels.reduction import Reducer, add_reduction
from memcallback.cuda.op_call import KernelBuilder, OpCall, Rule, accumulate_bytes, dense_bytes


def _full_bytes(call: OpCall) -> int:
    shape = torch.broadcast_shapes(call.arguments[0].shape, call.arguments[1].shape)
    size = int(call.arguments[0].element_size())
    return int(math.prod(shape)) * size


def _reduce_all(kernel: KernelBuilder, call: OpCall, count: int) -> None:
    """Reduce a contiguous tensor of the loss's dtype by `sum` or `mean`."""
    dtype = call.outputs[0].dtype
    low = dtype in (torch.float16, torch.bfloat16)
    reducer = Reducer(accumulate_bytes(dtype))
    add_reduction(
        kernel, call.device, reducer, dtype.itemsize, (count,), (1,), (True,), accumulates=low
    )


def _reduction(call: OpCall) -> int:
    """The argument `reduction`: 0 none, 1 mean, 2 sum."""
    return int(
        call.arguments[
            {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}.get(call.name, 2)
        ]
    )


def _in_place(call: OpCall) -> Kernel | None:
    """The output's storage first holds the unreduced loss.

    `binary_cross_entropy_cuda` (Loss.cu), `soft_margin_loss_out` (Loss.cpp).
    """
    if not _reduction(call):
        return None
    kernel = KernelBuilder()
    kernel.output(0)
    result = kernel.alloc(call.outputs[0].element_size())
    _reduce_all(kernel, call, _full_bytes(call) // call.arguments[0].element_size())
    kernel.free(result)
    return kernel.build()


def _beside(call: OpCall) -> Kernel | None:
    """The output and a temporary are allocated as large as the input.

    `mse_loss_out`, `smooth_l1_loss_out` (Loss.cpp).
    """
    if not _reduction(call):
        return None
    kernel = KernelBuilder()
    kernel.output(0)
    full = kernel.alloc(_full_bytes(call))
    _reduce_all(kernel, call, _full_bytes(call) // call.arguments[0].element_size())
    kernel.free(full)
    return kernel.build()


def _before(call: OpCall) -> Kernel | None:
    """`huber_loss` (Loss.cpp): the unreduced loss, then the output."""
    if not _reduction(call):
        return None
    kernel = KernelBuilder()
    full = kernel.alloc(_full_bytes(call))
    kernel.output(0)
    _reduce_all(kernel, call, _full_bytes(call) // call.arguments[0].element_size())
    kernel.free(full)
    return kernel.build()


def _with_logits(call: OpCall) -> Kernel:
    """`binary_cross_entropy_with_logits` (Loss.cpp).

    log_sigmoid, the weight of positive targets, the unreduced loss, the output.
    """
    x, target, _, positive = call.arguments[:4]
    full = _full_bytes(call)
    kernel = KernelBuilder()
    sigmoid = kernel.alloc(x.numel() * x.element_size())
    if positive is not None:
        less = kernel.alloc(positive.numel() * positive.element_size())
        shape = torch.broadcast_shapes(positive.shape, target.shape)
        weight = kernel.alloc(math.prod(shape) * x.element_size())
        kernel.free(less, weight)
    if not _reduction(call):
        kernel.output(0)
        kernel.free(sigmoid)
        return kernel.build()
    loss = kernel.alloc(full)
    kernel.output(0)
    _reduce_all(kernel, call, full // x.element_size())
    kernel.free(loss, sigmoid)
    return kernel.build()


def _nll_loss2d(call: OpCall) -> Kernel:
    """`nll_loss2d_forward_out_cuda_template` (NLLLoss2d.cu).

    The total weight, a loss per pixel, contiguous copies of input, target and weight.
    """
    kernel = KernelBuilder()
    kernel.output(*((1, 0) if call.arguments[3] == 0 else (0, 1)))
    kernel.free(
        *reversed([kernel.alloc_copy(t) for t in call.arguments[:3]] if call.arguments[3] else [])
    )
    return kernel.build()


def _ctc_loss_backward(call: OpCall) -> Kernel:
    """`ctc_loss_backward_gpu_template` (LossCTC.cu): lengths, offsets, a table as of the forward.

    Where much is computed, it sums over that table (`logsumexp`) before it collects the gradient,
    and copies the gradient to take infinite losses out.
    """
    log_probs, log_alpha = call.arguments[1], call.arguments[6]
    zero_infinity = call.arguments[8]
    num_times, batch_size, num_labels = log_probs.shape
    is_large = 2 * num_times + 24 * batch_size // 10 + 2 * num_labels // 10 > 450
    kernel = KernelBuilder()
    target_lengths, input_lengths, offsets = (kernel.alloc(8 * batch_size) for _ in range(3))
    log_beta, gradient = kernel.alloc(dense_bytes(log_alpha)), None
    if is_large and zero_infinity:
        gradient = kernel.alloc(dense_bytes(log_probs))
    else:
        kernel.output(0)
    if is_large:
        num_rows = batch_size * num_times
        num_blanks = (log_alpha.shape[2] + 1) // 2
        row_bytes = num_rows * log_probs.element_size()
        blanks, largest = kernel.alloc(num_blanks * row_bytes), kernel.alloc(row_bytes)
        absolute, is_infinite = kernel.alloc(row_bytes), kernel.alloc(num_rows)
        kernel.free(is_infinite, absolute)
        powers, total = kernel.alloc(num_blanks * row_bytes), kernel.alloc(row_bytes)
        kernel.free(powers, largest, total, blanks)
    if gradient is not None:
        zero, is_lost = kernel.alloc(log_probs.element_size()), kernel.alloc(batch_size)
        kernel.output(0)
        kernel.free(is_lost, zero, gradient)
    kernel.free(log_beta, input_lengths, target_lengths, offsets)
    return kernel.build()


RULES: dict[str, Rule] = {
    "_ctc_loss_backward": _ctc_loss_backward,
    "binary_cross_entropy": _in_place,
    "soft_margin_loss": _in_place,
    "mse_loss": _beside,
    "smooth_l1_loss": _beside,
    "huber_loss": _before,
    "binary_cross_entropy_with_logits": _with_logits,
    "nll_loss2d_forward": _nll_loss2d,
}
