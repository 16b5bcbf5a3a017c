"""ResNet with an optimizer that finds its own learning rate (prodigyopt)."""

from __future__ import annotations

from typing import Any

import torch
from prodigyopt import Prodigy
from torch.nn import functional as F
from torchvision.models import resnet18

from programs import Program


def make() -> Program:
    """ResNet-18, 16 images of 128 x 128."""
    batch = torch.randn(16, 3, 128, 128), torch.randint(0, 1000, (16,))
    return Program(
        resnet18(),
        batch,
        loss,
        ("prodigyopt", "torchvision"),
        optimizer=Prodigy,
        needs_values=True,  # whether weights are zero
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)
