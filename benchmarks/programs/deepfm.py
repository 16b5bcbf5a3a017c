"""DeepFM: a recommender of factors, a linear part and an MLP (plain PyTorch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from programs import Program

FIELDS = [50000, 20000, 8000, 3000, 1000, 500, 100, 50, 20, 10]


class DeepFM(nn.Module):
    """One table for all fields, with an offset for each."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = torch.tensor(FIELDS)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes)
        self.factors = nn.Embedding(sum(FIELDS), width)
        self.linear = nn.Embedding(sum(FIELDS), 1)
        self.bias = nn.Parameter(torch.zeros(1))
        layers: list[nn.Module] = []
        before = width * len(FIELDS) + 13
        for after in (400, 400, 400):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(0.2)]
            before = after
        self.deep = nn.Sequential(*layers, nn.Linear(before, 1))

    def forward(self, fields: torch.Tensor, numbers: torch.Tensor) -> Any:
        """The logit of each row."""
        fields = fields + self.offsets
        factors = self.factors(fields)
        pairs = factors.sum(1).square() - factors.square().sum(1)
        deep = self.deep(torch.cat([factors.flatten(1), numbers], 1)).squeeze(1)
        return self.bias + self.linear(fields).sum((1, 2)) + 0.5 * pairs.sum(1) + deep


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Binary cross entropy of clicks."""
    return F.binary_cross_entropy_with_logits(
        model(batch["fields"], batch["numbers"]), batch["clicks"]
    )


def make() -> Program:
    """10 fields, 13 numbers, 2,048 rows."""
    batch = {
        "fields": torch.stack([torch.randint(0, size, (2048,)) for size in FIELDS], 1),
        "numbers": torch.randn(2048, 13),
        "clicks": torch.randint(0, 2, (2048,)).float(),
    }
    return Program(
        DeepFM(),
        batch,
        loss,
        ("torch",),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-6),
    )
