"""A vision transformer with schedule-free AdamW (timm, schedulefree)."""

from __future__ import annotations

from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from timm import create_model
from torch.nn import functional as F

from programs import Program


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer, in the mode for training."""
    made = AdamWScheduleFree(parameters, lr=1e-3, warmup_steps=10)
    made.train()
    return made


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of all images."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make() -> Program:
    """ViT of 6 layers of width 192, 16 images of 224 x 224."""
    model = create_model("vit_tiny_patch16_224", depth=6, num_classes=10)
    batch = (torch.randn(16, 3, 224, 224), torch.randint(10, (16,)))
    return Program(model, batch, loss, ("timm", "schedulefree"), optimizer=optimizer)
