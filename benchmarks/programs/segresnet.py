"""SegResNet on volumes with the Dice and focal loss (MONAI)."""

from __future__ import annotations

from typing import Any

import torch
from monai.losses import DiceFocalLoss
from monai.networks.nets import SegResNet

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Dice and focal loss of sigmoids."""
    volumes, classes = batch
    total: torch.Tensor = DiceFocalLoss(sigmoid=True, squared_pred=True)(model(volumes), classes)
    return total


def make() -> Program:
    """16 filters, 2 volumes of 4 channels of 64 x 64 x 64, bf16 autocast."""
    model = SegResNet(
        spatial_dims=3,
        init_filters=16,
        in_channels=4,
        out_channels=3,
        blocks_down=(1, 2, 2, 4),
        blocks_up=(1, 1, 1),
        dropout_prob=0.2,
    )
    batch = torch.randn(2, 4, 64, 64, 64), (torch.rand(2, 3, 64, 64, 64) > 0.5).float()
    return Program(
        model,
        batch,
        loss,
        ("monai",),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4, weight_decay=1e-5),
        precision="bf16-mixed",
    )
