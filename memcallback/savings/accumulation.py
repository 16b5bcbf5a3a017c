"""accumulate(): gradient accumulation for a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise
from typing import TypeVar

import torch

from memcallback.savings.mixed_precision import Amp, clip_gradients
from memcallback.step.batch import infer_batch_size

Batch = TypeVar("Batch")
_END = object()


def accumulate(
    num_batches: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    amp: Amp | None = None,
) -> Accumulation:
    """Gradient accumulation for a plain loop: large-batch gradients in the memory of a small batch.

    Several micro-batches make a window, and each window ends with one update. Each micro-batch is
    weighted by its number of samples, and the last window may be smaller. So the gradients are
    those of one batch with all samples of the window, up to rounding, if the loss is a mean over
    samples and no layer mixes samples. Batch norm does mix them: it sees micro-batches. Step a
    learning-rate scheduler after each update, which is once a window.

        accumulation = mc.accumulate(4, model, optimizer)
        for batch in accumulation.over(loader):
            loss = loss_of(model, batch)
            accumulation.backward(loss)
            if accumulation.step(clip_grad_norm=1.0):
                scheduler.step()

    Under DistributedDataParallel ranks exchange gradients once a window (`no_sync` until then).
    Micro-batches then have equal weights, whatever their number of samples, since
    DistributedDataParallel gives each rank an equal weight.

    Args:
        num_batches: Micro-batches in a window, at least 1.
        model: The model that the loop calls, with its DistributedDataParallel wrapper if it has
            one.
        optimizer: The optimizer, or several, updated together.
        amp: What `memcallback.amp` returned; it then scales the loss and makes the update.

    Returns:
        The accumulation, which follows the loop through its windows.

    Raises:
        ValueError: If `num_batches` is below 1.
    """
    check_accumulate(num_batches)
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    return Accumulation(num_batches, model, optimizers, amp)


def check_accumulate(num_batches: object) -> None:
    """Check a number of micro-batches."""
    if not isinstance(num_batches, int) or isinstance(num_batches, bool) or num_batches < 1:
        raise ValueError(
            f"accumulate must be a whole number of at least 1, got {num_batches!r}. "
            "It is the number of batches for one update; with 1 each batch makes an update."
        )


class Accumulation:
    """Follows a loop through windows of micro-batches; made by `accumulate`.

    Attributes:
        num_batches: Micro-batches in a window.
    """

    def __init__(
        self,
        num_batches: int,
        model: torch.nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        amp: Amp | None,
    ) -> None:
        self.num_batches = num_batches
        self._model = model
        self._optimizers = optimizers
        self._amp = amp
        self._num_samples = 0
        self._window_samples = 0
        self._expected_samples = 0
        self._is_update_due = False

    def over(
        self, loader: Iterable[Batch], *, num_samples: Callable[[Batch], int] | None = None
    ) -> Iterator[Batch]:
        """The batches of an epoch; call `backward` and `step` for each.

        Gradients are cleared before the first micro-batch of a window. If the loader has no length,
        one batch is loaded ahead to know which is the last.

        Args:
            loader: The batches.
            num_samples: Counts the samples of a batch, or its tokens; inferred by default.

        Raises:
            ValueError: If `num_samples` is given on several ranks, or returns less than 1.
            RuntimeError: If `step` was not called when an update was due, or the loader's length
                is wrong.
        """
        has_ranks = (
            torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        )
        if num_samples is not None and has_ranks:
            raise ValueError(
                "num_samples cannot be given on several ranks: DistributedDataParallel gives every "
                "rank the same weight. Leave it out."
            )
        length = _length(loader)
        for position, (batch, is_last) in enumerate(_until_last(loader, length)):
            samples = 1 if has_ranks else (num_samples or _inferred_samples)(batch)
            if samples < 1:
                raise ValueError(
                    f"num_samples returned {samples} for batch {position}: it must be at least 1. "
                    "Leave such batches out of the loader."
                )
            if position % self.num_batches == 0:
                num_left = (
                    self.num_batches if length is None else min(self.num_batches, length - position)
                )
                self._begin_window(num_left * samples)
            self._num_samples = samples
            self._window_samples += samples
            self._is_update_due = is_last or (position + 1) % self.num_batches == 0
            with nullcontext() if self._is_update_due else self._no_sync():
                yield batch
            if self._is_update_due:
                raise RuntimeError(
                    f"After batch {position} an update was due and step() was not called. "
                    "Call it for each batch, also for one that you skip."
                )

    def _begin_window(self, expected_samples: int) -> None:
        self._expected_samples, self._window_samples = expected_samples, 0
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _no_sync(self) -> AbstractContextManager[object]:
        no_sync = getattr(self._model, "no_sync", nullcontext)
        context: AbstractContextManager[object] = no_sync()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the loss, weighted by this micro-batch's share of the window."""
        share = loss / (self._expected_samples / self._num_samples)
        if self._amp is None:
            share.backward()
        else:
            self._amp.backward(share)

    def step(
        self, *, clip_grad_norm: float | None = None, clip_grad_value: float | None = None
    ) -> bool:
        """At the end of a window, unscale and clip the gradients and update the weights.

        Args:
            clip_grad_norm: The largest norm of an optimizer's gradients together; None for no
                limit.
            clip_grad_value: The largest absolute value of a gradient; None for no limit.

        Returns:
            Whether the weights were updated.
        """
        if not self._is_update_due:
            return False
        self._is_update_due = False
        if self._window_samples != self._expected_samples:
            self._rescale(self._expected_samples / self._window_samples)
        if self._amp is not None:
            return self._amp.step(
                *self._optimizers, clip_grad_norm=clip_grad_norm, clip_grad_value=clip_grad_value
            )
        for optimizer in self._optimizers:
            clip_gradients(
                optimizer, clip_grad_norm=clip_grad_norm, clip_grad_value=clip_grad_value
            )
            optimizer.step()
        return True

    def _rescale(self, factor: float) -> None:
        """Correct the gradients of a window with another number of samples than expected.

        It is that of a smaller last batch, or of a loader without a length.
        """
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for parameter in dict.fromkeys(
            parameter for group in groups for parameter in group["params"]
        ):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _inferred_samples(batch: object) -> int:
    return infer_batch_size(batch).batch_size or 1


def _length(loader: Iterable[object]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]  # a DataLoader has a length that may raise
    except (TypeError, NotImplementedError):
        return None


def _until_last(loader: Iterable[Batch], length: int | None) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the last."""
    if length is None:
        for batch, following in pairwise(chain(loader, (_END,))):
            yield batch, following is _END  # type: ignore[misc]  # _END is never first
        return
    num_batches = 0
    for num_batches, batch in enumerate(loader, start=1):
        if num_batches > length:
            break
        yield batch, num_batches == length
    if num_batches != length:
        raise RuntimeError(
            f"The loader has a length of {length} and gave "
            f"{'more' if num_batches > length else num_batches} batches, so the last window was "
            "weighted wrongly. Correct its __len__, or hide it: over(batch for batch in loader)."
        )
