"""A U-Net for volumes (MONAI)."""

from __future__ import annotations

from typing import Any

import torch
from monai.networks.nets import UNet
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """4 levels with residual units, 2 volumes of 64 x 64 x 64."""
    model = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(16, 32, 64, 128),
        strides=(2, 2, 2),
        num_res_units=2,
    )
    batch = torch.randn(2, 1, 64, 64, 64), torch.randint(0, 2, (2, 64, 64, 64))
    return Program(model, batch, loss, ("monai",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of each voxel."""
    volumes, classes = batch
    return F.cross_entropy(model(volumes), classes)
