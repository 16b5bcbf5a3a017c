"""A radiance field: points on rays, encoded, rendered to colours (nerfacc)."""

from __future__ import annotations

from typing import Any

import torch
from nerfacc import accumulate_along_rays, render_weight_from_density
from torch import nn
from torch.nn import functional as F

from programs import Program


class Field(nn.Module):
    """Density and colour of points."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(10))
        self.first = nn.Sequential(nn.Linear(63, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.density = nn.Linear(128, 1)
        self.colour = nn.Sequential(nn.Linear(131, 64), nn.ReLU(), nn.Linear(64, 3), nn.Sigmoid())

    def forward(
        self, points: torch.Tensor, rays: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Densities (rays, samples) and colours (rays, samples, 3)."""
        angles = (points[..., None] * self.frequencies).flatten(-2)
        features = self.first(torch.cat([points, angles.sin(), angles.cos()], -1))
        density = F.softplus(self.density(features)).squeeze(-1)
        return density, self.colour(torch.cat([features, rays.expand_as(points)], -1))


def make() -> Program:
    """512 rays with 64 samples each."""
    batch = {
        "origins": torch.zeros(512, 3),
        "rays": F.normalize(torch.randn(512, 3)),
        "pixels": torch.rand(512, 3),
    }
    return Program(Field(), batch, loss, ("nerfacc",), optimizer=torch.optim.Adam)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Squared error of the pixels' colours."""
    rays = batch["rays"]
    edges = torch.linspace(2, 6, 65, device=rays.device).expand(len(rays), -1)
    edges = edges[:, :-1] + torch.rand_like(edges[:, 1:]) * 4 / 64
    starts, ends = edges, torch.cat([edges[:, 1:], edges[:, -1:] + 4 / 64], 1)
    middles = (starts + ends)[..., None] / 2
    points = batch["origins"][:, None] + middles * rays[:, None]
    density, colours = model(points, rays[:, None])
    weights, _, _ = render_weight_from_density(starts, ends, density)
    return F.mse_loss(accumulate_along_rays(weights, colours), batch["pixels"])
