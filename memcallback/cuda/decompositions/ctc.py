"""The CTC loss. Its tables are as long as the longest target, which only values say.

`ctc_loss` follows ATen/native/LossCTC.cpp, `ctc_forward` cuda/LossCTC.cu; the kernel rule of the
backward pass is in `kernels.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memcallback.core.torch_private import no_dispatch

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The loss by PyTorch's own kernel: `ctc_loss_impl`."""
    is_batched = log_probs.dim() == 3
    if not is_batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    apply: Callable[..., torch.Tensor] = _CtcLoss.apply
    loss = apply(log_probs, targets.to(torch.int64), input_lengths, target_lengths, zero_infinity)
    if zero_infinity:
        zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
        loss = torch.where(loss == float("inf"), zero, loss)
        del zero
    if reduction == _MEAN:
        lengths = torch.empty(loss.shape, dtype=loss.dtype, device=loss.device).clamp_min(1)
        return (loss / lengths).mean()
    if reduction == _SUM:
        return loss.sum()
    return loss if is_batched else loss.squeeze(0)


class _CtcLoss(torch.autograd.Function):
    """`_ctc_loss` and its backward pass, which is given no lengths: there may be any number."""

    @staticmethod
    def forward(
        ctx: Any,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        zero_infinity: bool,
    ) -> torch.Tensor:
        loss, log_alpha = _aten._ctc_loss(log_probs, targets, input_lengths, target_lengths)
        ctx.zero_infinity = zero_infinity
        ctx.save_for_backward(log_probs, targets, loss, log_alpha)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        log_probs, targets, loss, log_alpha = ctx.saved_tensors
        gradient = _aten._ctc_loss_backward(
            grad, log_probs, targets, (), (), loss, log_alpha, 0, ctx.zero_infinity
        )
        return gradient, None, None, None, None


def ctc_forward(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *,
    known: Callable[[torch.Tensor], torch.Tensor | None],
    assumed: dict[str, None],
    is_cuda: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_ctc_loss`: the loss of each sample, and a table of its targets at each time."""
    longest = _longest(targets, target_lengths, known, assumed)
    num_times, batch_size = log_probs.shape[:2]
    # Lengths and the targets' offsets, which a kernel reads.
    kept = [targets.new_empty(batch_size) for _ in range(3 if is_cuda else 0)]
    log_alpha = log_probs.new_empty(batch_size, num_times, 2 * longest + 1)
    loss = log_probs.new_empty(batch_size)
    del kept
    return loss, log_alpha


def _longest(
    targets: torch.Tensor,
    lengths: Any,
    known: Callable[[torch.Tensor], torch.Tensor | None],
    assumed: dict[str, None],
) -> int:
    """The length of the longest target."""
    if isinstance(lengths, torch.Tensor):
        lengths = known(lengths)
        if lengths is None:
            assumed[
                "The targets of a CTC loss have unknown lengths: the longest that their tensor "
                "has room for was assumed."
            ] = None
            return targets.shape[-1]
        with no_dispatch():
            lengths = lengths.tolist()
    return max(lengths, default=0)
