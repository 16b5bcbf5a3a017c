"""Video Swin on clips (torchvision)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torchvision.models.video import swin3d_t

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    clips, classes = batch
    return F.cross_entropy(model(clips), classes)


def make() -> Program:
    """The tiny one, 2 clips of 8 frames of 112 x 112, bf16 autocast."""
    batch = torch.randn(2, 3, 8, 112, 112), torch.randint(0, 20, (2,))
    return Program(swin3d_t(num_classes=20), batch, loss, ("torchvision",), precision="bf16-mixed")
