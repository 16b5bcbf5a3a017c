"""RetinaNet on a pyramid of features (torchvision)."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.models.detection import retinanet_resnet50_fpn_v2

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The sum of both losses."""
    images, targets = batch
    total: torch.Tensor = sum(model(images, targets).values())
    return total


def make() -> Program:
    """2 images of 256 x 256 with two boxes each."""
    model = retinanet_resnet50_fpn_v2(
        weights=None, weights_backbone=None, num_classes=5, min_size=256, max_size=256
    )
    boxes = torch.tensor([[20.0, 20.0, 120.0, 140.0], [150.0, 100.0, 250.0, 240.0]])
    images = [torch.rand(3, 256, 256) for _ in range(2)]
    targets = [{"boxes": boxes.clone(), "labels": torch.tensor([1, 2])} for _ in range(2)]
    return Program(model, (images, targets), loss, ("torchvision",), needs_values=True)
