"""EdgeConv on point clouds whose neighbours are given, as in DGCNN (torch_geometric)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import MLP, EdgeConv

from programs import Program

CLOUDS, POINTS, NEIGHBOURS = 8, 512, 20


class Network(nn.Module):
    """Three edge convolutions, the largest of all points, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = EdgeConv(MLP([6, 64, 64]), aggr="max")
        self.second = EdgeConv(MLP([128, 64]), aggr="max")
        self.third = EdgeConv(MLP([128, 128]), aggr="max")
        self.joined = MLP([256, 512])
        self.head = MLP([512, 256, 40], dropout=0.5, norm=None)

    def forward(self, points: torch.Tensor, edges: torch.Tensor) -> Any:
        """Scores of each cloud."""
        a = self.first(points, edges)
        b = self.second(a, edges)
        c = self.third(b, edges)
        joined = self.joined(torch.cat([a, b, c], dim=1))
        return self.head(joined.view(CLOUDS, POINTS, -1).amax(dim=1))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy with smoothed labels."""
    scores = model(batch["points"], batch["edges"])
    return F.cross_entropy(scores, batch["classes"], label_smoothing=0.2)


def make() -> Program:
    """8 clouds of 512 points with 20 neighbours each."""
    points = torch.randn(CLOUDS, POINTS, 3)
    near = torch.cdist(points, points).topk(NEIGHBOURS, largest=False).indices
    start = POINTS * torch.arange(CLOUDS)[:, None, None]
    source = (near + start).flatten()
    goal = torch.arange(CLOUDS * POINTS).repeat_interleave(NEIGHBOURS)
    batch = {
        "points": points.flatten(0, 1),
        "edges": torch.stack([source, goal]),
        "classes": torch.randint(0, 40, (CLOUDS,)),
    }
    return Program(
        Network(),
        batch,
        loss,
        ("torch_geometric",),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-4),
    )
