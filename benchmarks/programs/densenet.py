"""DenseNet-121 whose dense layers are checkpointed (torchvision)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torchvision.models import densenet121

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)


def make() -> Program:
    """8 images of 96 x 96, SGD with Nesterov's momentum."""
    model = densenet121(num_classes=100, drop_rate=0.1, memory_efficient=True)
    batch = torch.randn(8, 3, 96, 96), torch.randint(0, 100, (8,))
    return Program(
        model,
        batch,
        loss,
        ("torchvision",),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
        ),
    )
