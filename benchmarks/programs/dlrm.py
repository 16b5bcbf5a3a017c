"""A recommender of tables with sparse gradients and of MLPs (plain PyTorch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from programs import Program

NUM_ROWS = 100_000, 50_000, 20_000, 5_000


class Recommender(nn.Module):
    """Dense features and bags of categories, of which each meets each other."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(num_rows, 32, mode="sum", sparse=True) for num_rows in NUM_ROWS
        )
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(42, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: torch.Tensor, bags: list[torch.Tensor]) -> torch.Tensor:
        """Scores, of shape (batch,)."""
        bottom = self.bottom(dense)
        parts = [bottom, *(table(bag) for table, bag in zip(self.tables, bags, strict=True))]
        stacked = torch.stack(parts, 1)
        products = stacked @ stacked.mT
        first, second = torch.tril_indices(len(parts), len(parts), -1, device=dense.device)
        scores: torch.Tensor = self.top(torch.cat([bottom, products[:, first, second]], 1))
        return scores.squeeze(1)


def make() -> Program:
    """4 tables with 175,000 rows, 2048 samples with bags of 4 categories."""
    batch = {
        "dense": torch.randn(2048, 13),
        "bags": [torch.randint(0, num_rows, (2048, 4)) for num_rows in NUM_ROWS],
        "clicks": torch.randint(0, 2, (2048,)).float(),
    }
    # How many rows a sparse gradient has left, the device counts.
    return Program(
        Recommender(),
        batch,
        loss,
        ("torch",),
        optimizer=torch.optim.Adagrad,
        needs_values=True,
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Binary cross entropy of clicks."""
    return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["bags"]), batch["clicks"])
