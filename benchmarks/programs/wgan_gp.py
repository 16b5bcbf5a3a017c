"""The critic of a GAN with a gradient penalty (plain PyTorch)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from programs import Program


def generator() -> nn.Module:
    """As in DCGAN: from noise to images of 64 x 64."""
    widths = [128, 256, 128, 64, 32]
    layers: list[nn.Module] = [nn.ConvTranspose2d(widths[0], widths[1], 4, 1, 0, bias=False)]
    for before, after in pairwise(widths[1:]):
        layers += [nn.BatchNorm2d(before), nn.ReLU(True)]
        layers.append(nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False))
    layers += [nn.BatchNorm2d(32), nn.ReLU(True), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh()]
    return nn.Sequential(*layers)


def critic() -> nn.Module:
    """From images to a score."""
    widths = [3, 32, 64, 128, 256]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 4, 2, 1), nn.InstanceNorm2d(after, affine=True)]
        layers.append(nn.LeakyReLU(0.2, inplace=True))
    return nn.Sequential(*layers, nn.Conv2d(256, 1, 4, 1, 0), nn.Flatten(0))


def make() -> Program:
    """32 images of 64 x 64, Adam without momentum."""
    make_images = generator()

    def loss(model: Any, images: Any) -> torch.Tensor:
        noise = torch.randn(len(images), 128, 1, 1, device=images.device)
        with torch.no_grad():
            made = make_images(noise)
        share = torch.rand(len(images), 1, 1, 1, device=images.device)
        between = (share * images + (1 - share) * made).requires_grad_()
        (gradients,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (gradients.flatten(1).norm(2, dim=1) - 1).square().mean()
        return model(made).mean() - model(images).mean() + 10 * penalty

    return Program(
        critic(),
        torch.randn(32, 3, 64, 64),
        loss,
        ("torch",),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4, betas=(0.0, 0.9)),
    )
