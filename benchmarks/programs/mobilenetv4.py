"""MobileNetV4 in channels-last layout, with mixed targets and RMSprop of TensorFlow (timm)."""

from __future__ import annotations

from typing import Any

import torch
from timm import create_model
from timm.loss import SoftTargetCrossEntropy
from timm.optim import RMSpropTF

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy with targets that mixup made."""
    images, targets = batch
    total: torch.Tensor = SoftTargetCrossEntropy()(model(images), targets)
    return total


def make() -> Program:
    """The small convolutional one, 16 images of 160 x 160, bf16 autocast."""
    model = create_model("mobilenetv4_conv_small", num_classes=10, drop_rate=0.2)
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(16, 3, 160, 160).to(memory_format=torch.channels_last)
    return Program(
        model,
        (images, torch.rand(16, 10).softmax(-1)),
        loss,
        ("timm",),
        optimizer=lambda parameters: RMSpropTF(parameters, lr=0.01, momentum=0.9),
        precision="bf16-mixed",
    )
