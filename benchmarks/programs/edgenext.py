"""EdgeNeXt with smoothed labels (timm)."""

from __future__ import annotations

from typing import Any

import torch
from timm import create_model
from timm.loss import LabelSmoothingCrossEntropy

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy with smoothed labels."""
    images, classes = batch
    total: torch.Tensor = LabelSmoothingCrossEntropy(0.1)(model(images), classes)
    return total


def groups(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that decays matrices and kernels alone."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.05},
            {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=6e-4,
    )


def make() -> Program:
    """The smallest, 16 images of 128 x 128."""
    model = create_model("edgenext_xx_small", num_classes=100, drop_path_rate=0.1)
    batch = torch.randn(16, 3, 128, 128), torch.randint(0, 100, (16,))
    return Program(model, batch, loss, ("timm",), optimizer=groups)
