"""PointNet++ on point clouds whose neighbours are given (torch_geometric)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import MLP, PointNetConv, global_max_pool

from programs import Program


class PointNet(nn.Module):
    """Two PointNetConv, the maximum over each cloud, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = PointNetConv(MLP([3, 64, 64, 128]), add_self_loops=False)
        self.second = PointNetConv(MLP([128 + 3, 128, 256]), add_self_loops=False)
        self.head = MLP([256, 128, 10], dropout=0.5, norm=None)

    def forward(self, batch: Any) -> torch.Tensor:
        """The scores of each cloud's classes."""
        points, edges = batch["points"], batch["edges"]
        features = self.first(None, points, edges).relu()
        features = self.second(features, points, edges).relu()
        scores: torch.Tensor = self.head(global_max_pool(features, batch["clouds"], 8))
        return scores


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of all clouds."""
    return F.cross_entropy(model(batch), batch["y"])


def make() -> Program:
    """8 clouds of 256 points, 16 neighbours each."""
    clouds = torch.arange(8).repeat_interleave(256)
    neighbours = torch.randint(256, (2048, 16)) + 256 * clouds[:, None]
    batch = {
        "points": torch.rand(2048, 3),
        "edges": torch.stack([neighbours.flatten(), torch.arange(2048).repeat_interleave(16)]),
        "clouds": clouds,
        "y": torch.randint(10, (8,)),
    }
    return Program(PointNet(), batch, loss, ("torch_geometric",))
