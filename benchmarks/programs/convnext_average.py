"""ConvNeXt with mixup, soft targets, dropped paths and an average of its weights (timm)."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

from programs import Program


def make() -> Program:
    """ConvNeXt-Atto, 16 images of 160 x 160, bf16 autocast."""
    model = timm.create_model("convnext_atto", drop_path_rate=0.1)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=1000)
    batch = mixup(torch.randn(16, 3, 160, 160), torch.randint(0, 1000, (16,)))
    return Program(
        model,
        batch,
        loss,
        ("timm",),
        optimizer=lambda parameters: create_optimizer_v2(parameters, opt="lamb", lr=1e-3),
        precision="bf16-mixed",
        also=(ModelEmaV3(model),),
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of classes in parts."""
    images, parts = batch
    total: torch.Tensor = SoftTargetCrossEntropy()(model(images), parts)
    return total
