"""amp(): autocast and GradScaler for a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memcallback.devices.local import default_device
from memcallback.step.step import AUTOCAST

PRECISIONS = tuple(name for name, dtype in AUTOCAST.items() if dtype is not None)


def amp(
    precision: str,
    *,
    device: torch.device | str | None = None,
    say: Callable[[str], None] = print,
    **grad_scaler_options: Any,
) -> Amp:
    """Automatic mixed precision for a plain loop: most saved tensors need half the memory.

    The price is rounding.

    Mixed precision has three parts:

    - *Weight backup.* Parameters, their gradients and the optimizer's state stay in float32. Under
      `autocast`, matrix products and convolutions use copies of the weights in half precision. In
      half precision a small update would often vanish beside its weight; in float32 it counts.
    - *Loss scaling.* Gradients below 3e-8 round to 0 in float16. So the loss, and with it every
      gradient, is multiplied by a scale before the backward pass, and the gradients are divided by
      it before they are used (`torch.amp.GradScaler`). If one of them is inf or nan, the scale was
      too large: the step is skipped and the scale halved. After 2000 steps without inf or nan the
      scale is doubled. bfloat16 has the range of float32 and needs no scale.
    - *Precision accumulation.* Products of half-precision numbers are summed in float32, and
      operators that sum many values (losses, norms, softmax) run in float32. The device and
      `autocast` do that.

    A skipped step changes no weight, and `step` returns False, so that the loop can decide whether
    a learning-rate scheduler steps. Some skipped steps at the beginning are normal: the scale
    starts high.

    Args:
        precision: `16-mixed` (float16, with a GradScaler) or `bf16-mixed` (bfloat16, without).
        device: The device of the model; by default the current accelerator, else the CPU.
        say: Called with a message for the first, second, fourth, eighth ... skipped step.
        **grad_scaler_options: Options of `torch.amp.GradScaler`, such as `init_scale` and
            `growth_interval`.

    Returns:
        An object with the autocast context, the backward pass and the update to use in the loop.

    Raises:
        ValueError: For another precision, or for options of a GradScaler with bf16-mixed.

    Examples:
        >>> model, mixed = nn.Linear(8, 1), amp("bf16-mixed", device="cpu")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with mixed.autocast():
        ...     loss = model(torch.ones(4, 8)).square().mean()
        >>> mixed.backward(loss)
        >>> mixed.step(optimizer, clip_grad_norm=1.0)
        True
    """
    check_precision(precision)
    if grad_scaler_options and precision != "16-mixed":
        raise ValueError(
            f"{precision} has no GradScaler, so {', '.join(grad_scaler_options)} cannot be set. "
            "Leave it out, or use 16-mixed."
        )
    device_type = (default_device(()) if device is None else torch.device(device)).type
    scaler = (
        CountingGradScaler(device_type, say=say, **grad_scaler_options)
        if precision == "16-mixed"
        else None
    )
    return Amp(precision, device_type, scaler)


def check_precision(precision: object) -> None:
    """Check the name of a mixed precision."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"amp must be one of {', '.join(PRECISIONS)}, got {precision!r}. "
            "Leave it out to compute in the model's own type."
        )


class Amp:
    """The passes and the update of a step under mixed precision; made by `amp`.

    Attributes:
        precision: `16-mixed` or `bf16-mixed`.
        device_type: Where `autocast` computes in half precision.
        scaler: The GradScaler of `16-mixed`; None for `bf16-mixed`.
    """

    def __init__(self, precision: str, device_type: str, scaler: CountingGradScaler | None) -> None:
        self.precision = precision
        self.device_type = device_type
        self.scaler = scaler

    @property
    def num_skipped_steps(self) -> int:
        """Steps skipped because a gradient was inf or nan."""
        return 0 if self.scaler is None else self.scaler.num_skipped_steps

    def autocast(self) -> torch.autocast:
        """The context for the forward pass and the loss, and for nothing else."""
        return torch.autocast(self.device_type, dtype=AUTOCAST[self.precision])

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the loss, scaled with 16-mixed."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(
        self,
        *optimizers: torch.optim.Optimizer,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
    ) -> bool:
        """Unscale and clip the gradients, update the weights, and adapt the scale.

        Args:
            *optimizers: All optimizers of the step.
            clip_grad_norm: The largest norm of an optimizer's gradients together; None for no
                limit.
            clip_grad_value: The largest absolute value of a gradient; None for no limit.

        Returns:
            Whether the weights were updated; False if a gradient was inf or nan.
        """
        before = self.num_skipped_steps
        for optimizer in optimizers:
            if self.scaler is not None and (
                clip_grad_norm is not None or clip_grad_value is not None
            ):
                self.scaler.unscale_(optimizer)
            clip_gradients(
                optimizer, clip_grad_norm=clip_grad_norm, clip_grad_value=clip_grad_value
            )
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        return self.num_skipped_steps == before

    def state_dict(self) -> dict[str, Any]:
        """The GradScaler's state and the counts of steps, to save with the model; else empty."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state, also that of a plain `torch.amp.GradScaler`."""
        if bool(state_dict) == (self.scaler is None):
            saved = "without" if self.scaler is not None else "with"
            raise ValueError(
                f"the state was saved {saved} a GradScaler, and the precision is {self.precision}. "
                "Use the precision with which it was saved."
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


class CountingGradScaler(torch.amp.GradScaler):
    """A GradScaler that counts and reports the steps that it skips.

    Attributes:
        num_steps: Calls of `step`, the skipped ones included.
        num_skipped_steps: Of these, the steps that changed no weight.
    """

    def __init__(self, device_type: str, *, say: Callable[[str], None], **options: Any) -> None:
        super().__init__(device_type, **options)
        self.num_steps = self.num_skipped_steps = 0
        self._say = say

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As `torch.amp.GradScaler.step`."""
        updates: list[None] = []
        # A hook shows whether the optimizer ran without waiting for the device. A fused optimizer
        # always runs: its kernel skips the update.
        hook = optimizer.register_step_post_hook(lambda *_: updates.append(None))
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            hook.remove()
        self.num_steps += 1
        has_overflowed = getattr(optimizer, "_step_supports_amp_scaling", False) and any(
            found.item() for found in self._found_inf_per_device(optimizer).values()
        )
        if not updates or has_overflowed:
            self._count_skipped()
        return result

    def _count_skipped(self) -> None:
        self.num_skipped_steps += 1
        if self.num_skipped_steps & (self.num_skipped_steps - 1) == 0:
            self._say(
                f"Step {self.num_steps} was skipped: a gradient is inf or nan at loss scale "
                f"{self.get_scale():g}, which is lowered now. "
                f"Skipped so far: {self.num_skipped_steps} of {self.num_steps} steps."
            )

    def state_dict(self) -> dict[str, Any]:
        """As `torch.amp.GradScaler.state_dict`, with the counts."""
        return {
            **super().state_dict(),
            "num_steps": self.num_steps,
            "num_skipped_steps": self.num_skipped_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `torch.amp.GradScaler.load_state_dict`; the counts stay if the state has none."""
        super().load_state_dict(state_dict)
        self.num_steps = state_dict.get("num_steps", self.num_steps)
        self.num_skipped_steps = state_dict.get("num_skipped_steps", self.num_skipped_steps)


def clip_gradients(
    optimizer: torch.optim.Optimizer, *, clip_grad_norm: float | None, clip_grad_value: float | None
) -> None:
    """Clip an optimizer's gradients by their norm, by value, both or neither."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
    if clip_grad_value is not None:
        nn.utils.clip_grad_value_(parameters, clip_grad_value)
