"""Graph transformer convolutions with features of edges (torch_geometric)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import TransformerConv

from programs import Program


class Network(nn.Module):
    """Attention over edges, norms, residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.edges = nn.Linear(64, 128), nn.Linear(16, 128)
        self.layers = nn.ModuleList(
            TransformerConv(128, 32, heads=4, dropout=0.1, edge_dim=128, beta=True)
            for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(3))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge: torch.Tensor) -> Any:
        """Scores of each node."""
        x, edge = self.nodes(x), self.edges(edge)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x, edge_index, edge)))
        return self.head(x)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of all nodes."""
    return F.cross_entropy(model(batch["x"], batch["edge_index"], batch["edge"]), batch["y"])


def make() -> Program:
    """3 layers of width 128 with 4 heads on 3,000 nodes with 24,000 edges."""
    batch = {
        "x": torch.randn(3000, 64),
        "edge_index": torch.randint(3000, (2, 24000)),
        "edge": torch.randn(24000, 16),
        "y": torch.randint(10, (3000,)),
    }
    return Program(Network(), batch, loss, ("torch_geometric",))
