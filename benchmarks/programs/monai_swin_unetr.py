"""Swin UNETR on volumes with the Dice and cross-entropy loss (MONAI)."""

from __future__ import annotations

from typing import Any

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import SwinUNETR

from programs import Program


def make() -> Program:
    """Width 12, 1 volume of 64 x 64 x 64 with 3 classes, bf16 autocast."""
    model = SwinUNETR(in_channels=1, out_channels=3, feature_size=12, spatial_dims=3)
    batch = torch.randn(1, 1, 64, 64, 64), torch.randint(0, 3, (1, 1, 64, 64, 64))
    return Program(model, batch, loss, ("monai",), precision="bf16-mixed")


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Dice and cross entropy."""
    volumes, classes = batch
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    total: torch.Tensor = criterion(model(volumes), classes)
    return total
