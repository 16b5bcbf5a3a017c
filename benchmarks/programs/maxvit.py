"""MaxViT: convolutions, attention in windows and in grids (timm)."""

from __future__ import annotations

from typing import Any

import torch
from timm import create_model
from timm.optim import Lamb
from torch.nn import functional as F

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of all images."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def make() -> Program:
    """MaxViT of about 2 million weights, 8 images of 224 x 224, bf16 autocast, LAMB."""
    model = create_model(
        "maxvit_rmlp_pico_rw_256", img_size=224, num_classes=10, drop_path_rate=0.1
    )
    batch = (torch.randn(8, 3, 224, 224), torch.randint(10, (8,)))
    return Program(
        model,
        batch,
        loss,
        ("timm",),
        optimizer=lambda parameters: Lamb(parameters, lr=1e-3),
        precision="bf16-mixed",
    )
