"""Losses."""

from __future__ import annotations

import math

import torch

from memcallback.core.kernel import Kernel
from memcallback.cuda.kernels.call import Call, KernelBuilder, Rule, accumulate_bytes
from memcallback.cuda.kernels.reduction import Reducer, take_reduction


def _full_bytes(call: Call) -> int:
    shape = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape)
    size = int(call.args[0].element_size())
    return int(math.prod(shape)) * size


def _reduce_all(steps: KernelBuilder, call: Call, count: int) -> None:
    """`sum` or `mean` of a contiguous tensor of the loss's type."""
    dtype = call.outputs[0].dtype
    low = dtype in (torch.float16, torch.bfloat16)
    reducer = Reducer(accumulate_bytes(dtype))
    take_reduction(
        steps, call.device, reducer, dtype.itemsize, (count,), (1,), (True,), accumulates=low
    )


def _reduction(call: Call) -> int:
    """The argument `reduction`: 0 none, 1 mean, 2 sum."""
    return int(
        call.args[
            {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}.get(call.name, 2)
        ]
    )


def _in_place(call: Call) -> Kernel | None:
    """`binary_cross_entropy_cuda` (Loss.cu), `soft_margin_loss_out` (Loss.cpp): the output's
    storage holds every element's loss first.
    """
    if not _reduction(call):
        return None
    steps = KernelBuilder()
    steps.make(0)
    result = steps.take(call.outputs[0].element_size())
    _reduce_all(steps, call, _full_bytes(call) // call.args[0].element_size())
    steps.give(result)
    return steps.kernel


def _beside(call: Call) -> Kernel | None:
    """`mse_loss_out`, `smooth_l1_loss_out` (Loss.cpp): the output is made as large as its input,
    and so is a temporary.
    """
    if not _reduction(call):
        return None
    steps = KernelBuilder()
    steps.make(0)
    full = steps.take(_full_bytes(call))
    _reduce_all(steps, call, _full_bytes(call) // call.args[0].element_size())
    steps.give(full)
    return steps.kernel


def _before(call: Call) -> Kernel | None:
    """`huber_loss` (Loss.cpp): every element's loss, then the output."""
    if not _reduction(call):
        return None
    steps = KernelBuilder()
    full = steps.take(_full_bytes(call))
    steps.make(0)
    _reduce_all(steps, call, _full_bytes(call) // call.args[0].element_size())
    steps.give(full)
    return steps.kernel


def _with_logits(call: Call) -> Kernel:
    """`binary_cross_entropy_with_logits` (Loss.cpp): log_sigmoid, the weight of positive targets,
    every element's loss, the output.
    """
    x, target, _, positive = call.args[:4]
    full = _full_bytes(call)
    steps = KernelBuilder()
    sigmoid = steps.take(x.numel() * x.element_size())
    if positive is not None:
        less = steps.take(positive.numel() * positive.element_size())
        shape = torch.broadcast_shapes(positive.shape, target.shape)
        weight = steps.take(math.prod(shape) * x.element_size())
        steps.give(less, weight)
    if not _reduction(call):
        steps.make(0)
        steps.give(sigmoid)
        return steps.kernel
    loss = steps.take(full)
    steps.make(0)
    _reduce_all(steps, call, full // x.element_size())
    steps.give(loss, sigmoid)
    return steps.kernel


def _nll_loss2d(call: Call) -> Kernel:
    """`nll_loss2d_forward_out_cuda_template` (NLLLoss2d.cu): total weight, then a loss per pixel,
    contiguous copies of input, weight.
    """
    steps = KernelBuilder()
    steps.make(*((1, 0) if call.args[3] == 0 else (0, 1)))
    steps.give(*reversed([steps.take_copy(t) for t in call.args[:3]] if call.args[3] else []))
    return steps.kernel


RULES: dict[str, Rule] = {
    "binary_cross_entropy": _in_place,
    "soft_margin_loss": _in_place,
    "mse_loss": _beside,
    "smooth_l1_loss": _beside,
    "huber_loss": _before,
    "binary_cross_entropy_with_logits": _with_logits,
    "nll_loss2d_forward": _nll_loss2d,
}
