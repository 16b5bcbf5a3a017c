"""Translation by nn.Transformer with padding and causal masks (plain PyTorch)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from programs import Program


class Translator(nn.Module):
    """Embeddings with positions, nn.Transformer, scores of tokens."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.source = nn.Embedding(num_tokens, width, padding_idx=0)
        self.target = nn.Embedding(num_tokens, width, padding_idx=0)
        angle = torch.arange(512)[:, None] * torch.exp(
            torch.arange(0, width, 2) * (-math.log(10000.0) / width)
        )
        self.register_buffer("positions", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))
        self.dropout = nn.Dropout(0.1)
        self.transformer = nn.Transformer(
            width, 4, 3, 3, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, num_tokens)

    def embedded(self, table: nn.Embedding, tokens: torch.Tensor) -> Any:
        """Tokens with their positions."""
        scaled = table(tokens) * math.sqrt(table.embedding_dim)
        return self.dropout(scaled + self.positions[: tokens.shape[1]])

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Scores of the next tokens."""
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        out = self.transformer(
            self.embedded(self.source, source),
            self.embedded(self.target, target),
            tgt_mask=later,
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
        )
        return self.head(out)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy with smoothed labels, none of padding."""
    source, target = batch
    scores = model(source, target[:, :-1])
    return F.cross_entropy(
        scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1
    )


def make() -> Program:
    """3 layers each way of width 256, 16 sentences of up to 96 tokens, bf16 autocast."""
    lengths = torch.arange(16)[:, None]
    source = torch.randint(1, 8000, (16, 96)) * (torch.arange(96)[None] < 96 - 4 * lengths)
    target = torch.randint(1, 8000, (16, 81)) * (torch.arange(81)[None] < 81 - 3 * lengths)
    return Program(
        Translator(8000, 256),
        (source, target),
        loss,
        ("torch",),
        optimizer=lambda parameters: torch.optim.Adam(
            parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9
        ),
        precision="bf16-mixed",
    )
