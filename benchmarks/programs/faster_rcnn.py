"""Faster R-CNN on MobileNetV3: proposals, sampling and box losses (torchvision)."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The sum of the four losses."""
    images, targets = batch
    total: torch.Tensor = sum(model(images, targets).values())
    return total


def make() -> Program:
    """2 images of 320 x 320 with two boxes each."""
    model = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5
    )
    boxes = torch.tensor([[20.0, 20.0, 120.0, 140.0], [150.0, 100.0, 300.0, 280.0]])
    images = [torch.rand(3, 320, 320) for _ in range(2)]
    targets = [{"boxes": boxes.clone(), "labels": torch.tensor([1, 2])} for _ in range(2)]
    return Program(model, (images, targets), loss, ("torchvision",), needs_values=True)
