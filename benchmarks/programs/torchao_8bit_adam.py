"""A transformer with an AdamW of 8-bit state in plain PyTorch, compiled (torchao)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchao.optim import AdamW8bit

from programs import Program


class Tagger(nn.Module):
    """Words, transformer layers, tags."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.tags = nn.Linear(256, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of tags, of shape (batch, tokens, 16)."""
        scores: torch.Tensor = self.tags(self.encoder(self.words(tokens)))
        return scores


def make() -> Program:
    """2 layers, 8 sequences of 128 tokens."""
    batch = torch.randint(0, 4096, (8, 128)), torch.randint(0, 16, (8, 128))
    return Program(Tagger(), batch, loss, ("torchao",), optimizer=AdamW8bit)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of each tag."""
    tokens, tags = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
