"""DeepLabV3 on ResNet-50 with its auxiliary loss (torchvision)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torchvision.models.segmentation import deeplabv3_resnet50

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of each pixel, of both heads."""
    images, classes = batch
    losses = {
        name: F.cross_entropy(scores, classes, ignore_index=255)
        for name, scores in model(images).items()
    }
    return losses["out"] + 0.5 * losses["aux"]


def make() -> Program:
    """4 images of 160 x 160, 21 classes, SGD with momentum."""
    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21, aux_loss=True)
    batch = torch.randn(4, 3, 160, 160), torch.randint(0, 21, (4, 160, 160))
    return Program(
        model,
        batch,
        loss,
        ("torchvision",),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.02, momentum=0.9, weight_decay=1e-4
        ),
    )
