"""A neural ODE, solved by Runge-Kutta and differentiated through (torchdiffeq)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchdiffeq import odeint

from programs import Program


class Derivative(nn.Module):
    """How fast a state changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 64)
        )

    def forward(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The derivative in time; `time` is not looked at."""
        derivative: torch.Tensor = self.layers(state)
        return derivative


def make() -> Program:
    """1024 states of 64 numbers, a grid of 8 steps of Runge-Kutta."""
    batch = {
        "start": torch.randn(1024, 64),
        "seen": torch.randn(9, 1024, 64),
        "times": torch.linspace(0, 1, 9),
    }
    return Program(
        Derivative(),
        batch,
        loss,
        ("torchdiffeq",),
        optimizer=torch.optim.Adam,
        needs_values=True,
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Distance from the states that were seen."""
    states: Any = odeint(model, batch["start"], batch["times"], method="rk4")
    total: torch.Tensor = (states - batch["seen"]).abs().mean()
    return total
