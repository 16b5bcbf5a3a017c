"""A U-Net on ResNet-18 with the Dice loss (segmentation_models_pytorch)."""

from __future__ import annotations

from typing import Any

import torch
from segmentation_models_pytorch import Unet
from segmentation_models_pytorch.losses import DiceLoss

from programs import Program

dice = DiceLoss("multiclass")


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The Dice loss of all classes."""
    images, masks = batch
    own: torch.Tensor = dice(model(images), masks)
    return own


def make() -> Program:
    """4 images of 128 x 128 in 4 classes."""
    model = Unet("resnet18", encoder_weights=None, classes=4)
    batch = (torch.randn(4, 3, 128, 128), torch.randint(4, (4, 128, 128)))
    return Program(model, batch, loss, ("segmentation_models_pytorch", "timm"))
