"""Faces by a RegNet and an ArcFace loss with weights of its own (timm, pytorch-metric-learning)."""

from __future__ import annotations

import torch
from pytorch_metric_learning.losses import ArcFaceLoss
from timm import create_model
from torch import nn

from programs import Program


class Faces(nn.Module):
    """A network and the classes' directions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = create_model("regnety_002", num_classes=256)
        self.margin = ArcFaceLoss(num_classes=5000, embedding_size=256)

    def forward(self, images: torch.Tensor, people: torch.Tensor) -> torch.Tensor:
        """The loss."""
        total: torch.Tensor = self.margin(self.network(images), people)
        return total


def make() -> Program:
    """RegNetY-200MF, 32 images of 112 x 112, 5,000 people, SGD."""
    batch = torch.randn(32, 3, 112, 112), torch.randint(5000, (32,))
    return Program(
        Faces(),
        batch,
        lambda model, batch: model(*batch),
        ("timm", "pytorch-metric-learning"),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, weight_decay=5e-4
        ),
        needs_values=True,
    )
