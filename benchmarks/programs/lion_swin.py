"""Swin transformer that drops paths, trained with Lion (timm, lion-pytorch)."""

from __future__ import annotations

from typing import Any

import timm
import torch
from lion_pytorch import Lion
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """Swin of width 48, 8 images of 224 x 224."""
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        embed_dim=48,
        depths=(2, 2, 2, 2),
        drop_path_rate=0.2,
        num_classes=100,
    )
    batch = torch.randn(8, 3, 224, 224), torch.randint(0, 100, (8,))
    return Program(model, batch, loss, ("timm", "lion-pytorch"), optimizer=Lion)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)
