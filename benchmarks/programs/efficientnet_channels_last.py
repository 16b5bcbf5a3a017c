"""EfficientNet-B0 in channels-last layout (timm)."""

from __future__ import annotations

from typing import Any

import torch
from timm import create_model
from torch.nn import functional as F

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of all images."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def make() -> Program:
    """8 images of 128 x 128, bf16 autocast, SGD with momentum."""
    model = create_model("efficientnet_b0", num_classes=10, drop_path_rate=0.1)
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 128, 128).to(memory_format=torch.channels_last)
    return Program(
        model,
        (images, torch.randint(10, (8,))),
        loss,
        ("timm",),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        precision="bf16-mixed",
    )
