"""A Fourier operator with complex weights, by its relative loss (neuraloperator)."""

from __future__ import annotations

from typing import Any

import torch
from neuralop import LpLoss
from neuralop.models import FNO

from programs import Program


def make() -> Program:
    """4 layers of width 32 with 16 x 16 modes, 8 fields of 64 x 64."""
    model = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32)
    batch = torch.randn(8, 1, 64, 64), torch.randn(8, 1, 64, 64)
    return Program(model, batch, loss, ("neuraloperator",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Relative distance of the fields."""
    before, after = batch
    distance: torch.Tensor = LpLoss(d=2)(model(before), after)
    return distance
