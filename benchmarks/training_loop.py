"""The reference loop of the accuracy proof: plain training in a fixed order.

A prediction follows it exactly.

Before the first step: the model goes to the device as `nn.Module.to` moves it, then the optimizers
are made, then the GradScaler (16-mixed only; with so small a scale that no update is skipped). One
step is one micro-batch:

1. every tensor of the batch goes to the device;
2. on the first micro-batch of a window `zero_grad(set_to_none=True)`;
3. FORWARD: `loss = loss_function(model, batch)`, under autocast if the precision is a mixed one;
   when autocast has ended, `loss = loss / accumulate` if several micro-batches make an update;
4. BACKWARD: `loss.backward()`, with a GradScaler `scaler.scale(loss).backward()`;
5. OPTIMIZER_STEP, on the last micro-batch of a window: with clipping `scaler.unscale_(optimizer)`
   and `clip_grad_norm_` of the optimizer's parameters, then `optimizer.step()`, or
   `scaler.step(optimizer)` and `scaler.update()`;
6. the loss goes, then the batch.

Steps 1, 2 and 6 are outside of all phases. With several optimizers 2 to 5 are done for each of them
in turn, each with a loss of its own, and the loss of the one is dropped before the next begins. An
optimizer that calls a closure (LBFGS) runs 2 to 4 in it, and the whole is one window, since nothing
marks a boundary inside.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accuracy_configs import Config, Parts
from models.workloads import Batch, Loss
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memcallback.core.types import Phase
from memcallback.record.recorder import MemoryRecorder

#: Updates. In the first, gradients and the optimizer's state appear. From the second on every
#: update asks for the same, but the allocator finds other free blocks until it has settled, seldom
#: later than in the fifth; in some models it comes to alternate between two or three arrangements.
NUM_WINDOWS = 6


def train(config: Config, parts: Parts, recorder: MemoryRecorder, device: torch.device) -> None:
    """Train `NUM_WINDOWS` updates; the recorder gets one step for each micro-batch.

    Args:
        config: What to train.
        parts: What `config.make` gave, on the CPU.
        recorder: Told where steps and phases begin and end.
        device: Where to train.
    """
    loop = _Loop(config, parts, recorder, device)
    for _ in range(NUM_WINDOWS):
        for number in range(config.accumulate):
            with recorder.step(parts.batch):
                loop.step(is_first=number == 0, is_last=number == config.accumulate - 1)


class _Loop:
    def __init__(
        self, config: Config, parts: Parts, recorder: MemoryRecorder, device: torch.device
    ) -> None:
        self.config, self.recorder, self.device = config, recorder, device
        self.cpu_batch, self.losses = parts.batch, parts.losses
        self.model = parts.model.to(device)
        self.optimizers = [make(self.model) for make in parts.optimizers]
        self.scaler = (
            torch.amp.GradScaler(device.type, init_scale=128.0) if config.has_grad_scaler else None
        )

    def step(self, *, is_first: bool, is_last: bool) -> None:
        batch = to_device(self.cpu_batch, self.device)
        for loss_function, optimizer in zip(self.losses, self.optimizers, strict=True):
            if self.config.has_closure:
                self._step_with_closure(loss_function, optimizer, batch)
                continue
            if is_first:
                optimizer.zero_grad(set_to_none=True)
            with self.recorder.phase(Phase.FORWARD):
                loss = self._forward(loss_function, batch)
            with self.recorder.phase(Phase.BACKWARD):
                self._backward(loss)
            if is_last:
                with self.recorder.phase(Phase.OPTIMIZER_STEP):
                    self._update(optimizer)
            del loss
        del batch

    def _forward(self, loss_function: Loss, batch: Batch) -> Tensor:
        dtype = self.config.autocast_dtype
        with torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext():
            loss = loss_function(self.model, batch)
        return loss / self.config.accumulate if self.config.accumulate > 1 else loss

    def _backward(self, loss: Tensor) -> None:
        if self.scaler:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        if self.config.clip_grad_norm is not None:
            if self.scaler:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]],
                self.config.clip_grad_norm,
            )
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def _step_with_closure(
        self, loss_function: Loss, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = self._forward(loss_function, batch)
            loss.backward()
            return loss

        self.recorder.open_phase(Phase.OPTIMIZER_STEP)
        with _CurvatureIsPositive():
            optimizer.step(closure)  # type: ignore[arg-type]
        self.recorder.close_phase(covers=tuple(Phase))


class _CurvatureIsPositive(TorchFunctionMode):
    """Let LBFGS keep its direction: it asks whether `ys > 1e-10`, which holds in practice.

    A virtual device reads every value as 0, where it does not hold.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return (
            True
            if getattr(function, "__name__", "") in ("__gt__", "gt") and args[1] == 1e-10
            else result
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on a device."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
