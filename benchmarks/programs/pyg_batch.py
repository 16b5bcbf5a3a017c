"""GIN on a `Batch` of small graphs, given as it is (torch_geometric)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GIN, MLP, global_add_pool

from programs import Program


class GraphClassifier(nn.Module):
    """GIN, the sum over each graph's nodes, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gin = GIN(16, 128, num_layers=4, norm="batch_norm")
        self.head = MLP([128, 128, 5], dropout=0.5)

    def forward(self, graphs: Any) -> torch.Tensor:
        """The scores of each graph's classes."""
        nodes = self.gin(graphs.x, graphs.edge_index)
        scores: torch.Tensor = self.head(global_add_pool(nodes, graphs.batch, graphs.num_graphs))
        return scores


def loss(model: Any, graphs: Any) -> torch.Tensor:
    """Cross entropy of all graphs."""
    return F.cross_entropy(model(graphs), graphs.y)


def make() -> Program:
    """32 graphs of 20 to 82 nodes, with four edges a node."""
    graphs = [
        Data(
            x=torch.randn(num_nodes, 16),
            edge_index=torch.randint(num_nodes, (2, 4 * num_nodes)),
            y=torch.randint(5, (1,)),
        )
        for num_nodes in range(20, 84, 2)
    ]
    return Program(GraphClassifier(), Batch.from_data_list(graphs), loss, ("torch_geometric",))
