"""A small network trained on all triplets of a batch (pytorch-metric-learning)."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning.losses import TripletMarginLoss
from torchvision.models import resnet18

from programs import Program


def make() -> Program:
    """ResNet-18, 64 images of 64 x 64, 8 of each class."""
    batch = torch.randn(64, 3, 64, 64), torch.arange(64) // 8
    return Program(
        resnet18(num_classes=128), batch, loss, ("pytorch-metric-learning",), needs_values=True
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Margin of each triplet."""
    images, classes = batch
    total: torch.Tensor = TripletMarginLoss(margin=0.2)(model(images), classes)
    return total
