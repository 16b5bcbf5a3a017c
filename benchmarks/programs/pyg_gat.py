"""Graph attention over the edges of a random graph (torch_geometric)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch_geometric.nn import GAT

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of all nodes."""
    return F.cross_entropy(model(batch["x"], batch["edge_index"]), batch["y"])


def make() -> Program:
    """3 layers of width 128 with 4 heads on 4,000 nodes with 40,000 edges."""
    model = GAT(64, 128, num_layers=3, out_channels=10, heads=4, dropout=0.3, v2=True)
    batch = {
        "x": torch.randn(4000, 64),
        "edge_index": torch.randint(4000, (2, 40000)),
        "y": torch.randint(10, (4000,)),
    }
    return Program(model, batch, loss, ("torch_geometric",), needs_values=True)
