"""Two generators and two critics of images, in one loss, as of CycleGAN (plain PyTorch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from programs import Program


class Residual(nn.Module):
    """Two convolutions around which the input passes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(width, width, 3),
            nn.InstanceNorm2d(width),
            nn.ReLU(True),
            nn.ReflectionPad2d(1),
            nn.Conv2d(width, width, 3),
            nn.InstanceNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum."""
        total: torch.Tensor = x + self.layers(x)
        return total


def generator() -> nn.Module:
    """From images to images."""
    return nn.Sequential(
        nn.ReflectionPad2d(3),
        nn.Conv2d(3, 32, 7),
        nn.InstanceNorm2d(32),
        nn.ReLU(True),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.InstanceNorm2d(64),
        nn.ReLU(True),
        nn.Conv2d(64, 128, 3, 2, 1),
        nn.InstanceNorm2d(128),
        nn.ReLU(True),
        *(Residual(128) for _ in range(3)),
        nn.ConvTranspose2d(128, 64, 3, 2, 1, 1),
        nn.InstanceNorm2d(64),
        nn.ReLU(True),
        nn.ConvTranspose2d(64, 32, 3, 2, 1, 1),
        nn.InstanceNorm2d(32),
        nn.ReLU(True),
        nn.ReflectionPad2d(3),
        nn.Conv2d(32, 3, 7),
        nn.Tanh(),
    )


def critic() -> nn.Module:
    """From images to scores of patches."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.InstanceNorm2d(64),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(64, 128, 4, 2, 1),
        nn.InstanceNorm2d(128),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(128, 1, 4, 1, 1),
    )


def squared(scores: torch.Tensor, wanted: float) -> torch.Tensor:
    """The loss of least squares."""
    return F.mse_loss(scores, torch.full_like(scores, wanted))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Of the generators, for which the critics are frozen, then of the critics."""
    a, b = batch["a"], batch["b"]
    critics = nn.ModuleList([model["of_a"], model["of_b"]])
    critics.requires_grad_(False)
    made_b, made_a = model["to_b"](a), model["to_a"](b)
    cycle = F.l1_loss(model["to_a"](made_b), a) + F.l1_loss(model["to_b"](made_a), b)
    same = F.l1_loss(model["to_a"](a), a) + F.l1_loss(model["to_b"](b), b)
    fooled = squared(model["of_a"](made_a), 1.0) + squared(model["of_b"](made_b), 1.0)
    critics.requires_grad_(True)
    seen = squared(model["of_a"](a), 1.0) + squared(model["of_b"](b), 1.0)
    caught = squared(model["of_a"](made_a.detach()), 0.0)
    caught = caught + squared(model["of_b"](made_b.detach()), 0.0)
    total: torch.Tensor = fooled + 10 * cycle + 5 * same + 0.5 * (seen + caught)
    return total


def make() -> Program:
    """2 images of 128 x 128 of each kind."""
    model = nn.ModuleDict(
        {"to_a": generator(), "to_b": generator(), "of_a": critic(), "of_b": critic()}
    )
    batch = {"a": torch.randn(2, 3, 128, 128), "b": torch.randn(2, 3, 128, 128)}
    return Program(
        model,
        batch,
        loss,
        ("torch",),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-4, betas=(0.5, 0.999)),
    )
