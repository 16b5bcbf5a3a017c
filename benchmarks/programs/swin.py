"""Swin transformer on images (timm)."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """Swin tiny, 8 images of 224 x 224, bf16 autocast."""
    batch = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    return Program(
        timm.create_model("swin_tiny_patch4_window7_224"),
        batch,
        loss,
        ("timm",),
        precision="bf16-mixed",
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)
