"""ResNet with an average of its weights beside it (timm's ModelEmaV3)."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.utils import ModelEmaV3
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """ResNet-50, 8 images of 224 x 224."""
    model = timm.create_model("resnet50")
    batch = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    return Program(model, batch, loss, ("timm",), also=(ModelEmaV3(model),))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)
