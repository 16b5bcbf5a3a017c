"""N-BEATS forecasts series by trend, seasonality and a generic stack (nbeats-pytorch)."""

from __future__ import annotations

from typing import Any

import torch
from nbeats_pytorch.model import NBeatsNet
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """Three stacks of 3 blocks, 1024 series of 60 values, 12 to come."""
    model = NBeatsNet(
        device=torch.device("cpu"),
        stack_types=(NBeatsNet.TREND_BLOCK, NBeatsNet.SEASONALITY_BLOCK, NBeatsNet.GENERIC_BLOCK),
        forecast_length=12,
        backcast_length=60,
        hidden_layer_units=512,
        thetas_dim=(4, 8, 8),
    )
    for stack in model.stacks:  # the blocks move what they get to a device of their own
        for block in stack:
            block.device = torch.device("cuda")
    model.device = torch.device("cuda")
    batch = torch.randn(1024, 60), torch.randn(1024, 12)
    return Program(model, batch, loss, ("nbeats-pytorch",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Squared error of the forecast."""
    past, future = batch
    _, forecast = model(past)
    return F.mse_loss(forecast, future)
