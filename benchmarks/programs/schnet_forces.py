"""SchNet's blocks for energies, and forces as their gradients (torch_geometric)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock, ShiftedSoftplus

from programs import Program

NUM_MOLECULES, NUM_ATOMS = 16, 20


class Energies(nn.Module):
    """Atoms, interactions, a sum over each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(100, 128, padding_idx=0)
        self.distances = GaussianSmearing(0.0, 5.0, 50)
        self.blocks = nn.ModuleList(InteractionBlock(128, 50, 128, 5.0) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(128, 64), ShiftedSoftplus(), nn.Linear(64, 1))

    def forward(
        self, kinds: torch.Tensor, positions: torch.Tensor, edges: torch.Tensor
    ) -> torch.Tensor:
        """Energies, of shape (molecules,)."""
        x = self.atoms(kinds)
        first, second = edges
        length = (positions[first] - positions[second]).norm(dim=-1)
        features = self.distances(length)
        for block in self.blocks:
            x = x + block(x, edges, length, features)
        energies: torch.Tensor = self.head(x).view(NUM_MOLECULES, NUM_ATOMS).sum(1)
        return energies


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Errors of energies and of forces."""
    positions = batch["positions"].requires_grad_()
    energies = model(batch["kinds"], positions, batch["edges"])
    (gradients,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
    return F.mse_loss(energies, batch["energies"]) + 100 * F.mse_loss(-gradients, batch["forces"])


def make() -> Program:
    """3 blocks of width 128, 16 molecules of 20 atoms, each with each."""
    pairs = torch.cartesian_prod(torch.arange(NUM_ATOMS), torch.arange(NUM_ATOMS))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    edges = torch.cat([pairs + i * NUM_ATOMS for i in range(NUM_MOLECULES)]).T.contiguous()
    num_atoms = NUM_MOLECULES * NUM_ATOMS
    batch = {
        "kinds": torch.randint(1, 10, (num_atoms,)),
        "positions": torch.randn(num_atoms, 3),
        "edges": edges,
        "energies": torch.randn(NUM_MOLECULES),
        "forces": torch.randn(num_atoms, 3),
    }
    return Program(Energies(), batch, loss, ("torch_geometric",), optimizer=torch.optim.Adam)
