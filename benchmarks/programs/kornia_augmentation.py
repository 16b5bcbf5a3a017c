"""Images augmented on the device, then a small network (kornia)."""

from __future__ import annotations

from typing import Any

import torch
from kornia import augmentation
from torch.nn import functional as F
from torchvision.models import resnet18

from programs import Program

AUGMENT = augmentation.ImageSequential(
    augmentation.RandomResizedCrop((112, 112), p=1.0),
    augmentation.RandomHorizontalFlip(p=1.0),
    augmentation.ColorJiggle(0.2, 0.2, 0.2, 0.1, p=1.0),
    augmentation.RandomGaussianBlur((5, 5), (0.1, 2.0), p=1.0),
)


def make() -> Program:
    """ResNet-18, 16 images of 128 x 128 that become 112 x 112."""
    batch = torch.rand(16, 3, 128, 128), torch.randint(0, 10, (16,))
    return Program(resnet18(num_classes=10), batch, loss, ("kornia", "torchvision"))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    images, classes = batch
    with torch.no_grad():
        augmented = AUGMENT(images)
    return F.cross_entropy(model(augmented), classes)
