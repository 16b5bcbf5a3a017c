"""A neural spline flow that learns a density by maximum likelihood (zuko)."""

from __future__ import annotations

from typing import Any

import torch
from zuko.flows import NSF

from programs import Program


class Density(torch.nn.Module):
    """The negative logarithm of a flow's density."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = NSF(features=16, context=4, transforms=4, hidden_features=(256, 256))

    def forward(self, points: torch.Tensor, conditions: torch.Tensor) -> torch.Tensor:
        """One number for each point."""
        density: torch.Tensor = -self.flow(conditions).log_prob(points)
        return density


def make() -> Program:
    """4 transforms of 16 dimensions under 4 conditions, 4,096 points."""
    batch = torch.randn(4096, 16), torch.randn(4096, 4)
    return Program(Density(), batch, loss, ("zuko",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The mean over the points."""
    mean: torch.Tensor = model(*batch).mean()
    return mean
