"""A recommender of next items by self-attention, with sampled negatives (plain PyTorch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from programs import Program

NUM_ITEMS, LENGTH, WIDTH = 40_000, 100, 64


class Recommender(nn.Module):
    """Items with positions, causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(NUM_ITEMS, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.dense = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(WIDTH, WIDTH, 1),
                nn.Dropout(0.2),
                nn.ReLU(),
                nn.Conv1d(WIDTH, WIDTH, 1),
                nn.Dropout(0.2),
            )
            for _ in range(2)
        )

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        """What each position looks for, of shape (batch, length, width)."""
        places = torch.arange(LENGTH, device=history.device)
        x = self.dropout(self.items(history) * WIDTH**0.5 + self.positions(places))
        x = x * (history != 0).unsqueeze(-1)
        later = ~torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=history.device))
        for i in range(2):
            query = self.norms[2 * i](x)
            x = query + self.attention[i](query, x, x, attn_mask=later, need_weights=False)[0]
            x = self.norms[2 * i + 1](x)
            x = x + self.dense[i](x.mT).mT
        return x


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Binary cross entropy of the next item and of one that was not chosen."""
    wanted = model(batch["history"])
    good = (wanted * model.items(batch["next"])).sum(-1)
    bad = (wanted * model.items(batch["other"])).sum(-1)
    is_item = (batch["next"] != 0).float()
    losses = F.softplus(-good) + F.softplus(bad)
    return (losses * is_item).sum() / is_item.sum()


def make() -> Program:
    """2 layers of width 64, 128 users of 100 items."""
    batch = {
        name: torch.randint(0 if name == "history" else 1, NUM_ITEMS, (128, LENGTH))
        for name in ("history", "next", "other")
    }
    return Program(
        Recommender(),
        batch,
        loss,
        ("torch",),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.98)),
    )
