"""MoCo: a momentum encoder and a bank of negatives beside the encoder (lightly)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import nn
from torchvision.models import resnet18

from programs import Program


class MoCo(nn.Module):
    """An encoder, its slow copy and the loss, which holds the bank."""

    def __init__(self) -> None:
        super().__init__()
        backbone = resnet18()
        backbone.fc = nn.Identity()
        self.encoder = nn.Sequential(backbone, MoCoProjectionHead(512, 512, 128))
        self.momentum = copy.deepcopy(self.encoder)
        deactivate_requires_grad(self.momentum)
        self.criterion = NTXentLoss(temperature=0.1, memory_bank_size=(4096, 128))


def make() -> Program:
    """ResNet-18, 32 images of 96 x 96 in two views, a bank of 4096."""
    batch = torch.randn(32, 3, 96, 96), torch.randn(32, 3, 96, 96)
    return Program(MoCo(), batch, loss, ("lightly",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The views of an image are near to each other, and far from the bank's."""
    first, second = batch
    update_momentum(model.encoder, model.momentum, m=0.99)
    with torch.no_grad():
        keys = model.momentum(second)
    total: torch.Tensor = model.criterion(model.encoder(first), keys)
    return total
