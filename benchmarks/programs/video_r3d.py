"""R3D-18 on clips of video (torchvision)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torchvision.models.video import r3d_18

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of all clips."""
    clips, classes = batch
    return F.cross_entropy(model(clips), classes)


def make() -> Program:
    """4 clips of 8 frames of 112 x 112, bf16 autocast, SGD."""
    batch = torch.randn(4, 3, 8, 112, 112), torch.randint(0, 20, (4,))
    return Program(
        r3d_18(weights=None, num_classes=20),
        batch,
        loss,
        ("torchvision",),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        precision="bf16-mixed",
    )
