"""DynUNet on volumes with deep supervision, as in nnU-Net (MONAI)."""

from __future__ import annotations

from typing import Any

import torch
from monai.losses import DeepSupervisionLoss, DiceCELoss
from monai.networks.nets import DynUNet

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Dice and cross entropy at each level."""
    volumes, classes = batch
    criterion = DeepSupervisionLoss(DiceCELoss(to_onehot_y=True, softmax=True))
    total: torch.Tensor = criterion(list(model(volumes).unbind(1)), classes)
    return total


def make() -> Program:
    """5 levels, 2 volumes of 64 x 64 x 64, bf16 autocast, SGD with Nesterov's momentum."""
    model = DynUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=3,
        kernel_size=[3] * 5,
        strides=[1, 2, 2, 2, 2],
        upsample_kernel_size=[2] * 4,
        filters=[16, 32, 64, 128, 160],
        deep_supervision=True,
        deep_supr_num=2,
        res_block=True,
    )
    batch = torch.randn(2, 1, 64, 64, 64), torch.randint(0, 3, (2, 1, 64, 64, 64))
    return Program(
        model,
        batch,
        loss,
        ("monai",),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5
        ),
        precision="bf16-mixed",
    )
