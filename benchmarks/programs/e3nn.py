"""A network on the atoms of molecules that turns with them (e3nn)."""

from __future__ import annotations

from typing import Any

import torch
from e3nn.nn.models.v2106.gate_points_networks import NetworkForAGraphWithAttributes
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """2 layers of 8 features of each kind up to vectors, 128 atoms with 16 neighbours each."""
    model = NetworkForAGraphWithAttributes(
        irreps_node_input="8x0e",
        irreps_node_attr="4x0e",
        irreps_edge_attr="2x0e",
        irreps_node_output="1x0e",
        max_radius=3.0,
        num_neighbors=16,
        num_nodes=128,
        mul=8,
        layers=2,
        lmax=1,
    )
    batch = {
        "pos": torch.randn(128, 3),
        "edge_index": torch.stack([torch.randint(0, 128, (2048,)), torch.arange(2048) // 16]),
        "node_input": torch.randn(128, 8),
        "node_attr": torch.randn(128, 4),
        "edge_attr": torch.randn(2048, 2),
        "energy": torch.randn(1, 1),
    }
    return Program(model, batch, loss, ("e3nn",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Squared error of the energy."""
    return F.mse_loss(model(batch), batch["energy"])
