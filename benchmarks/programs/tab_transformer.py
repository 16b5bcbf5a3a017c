"""FT-Transformer: columns of a table attend to each other (tab-transformer-pytorch)."""

from __future__ import annotations

from typing import Any

import torch
from tab_transformer_pytorch import FTTransformer
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """4 layers of width 64, 512 rows of 10 categories and 10 numbers."""
    model = FTTransformer(
        categories=(16,) * 10,
        num_continuous=10,
        dim=64,
        dim_out=1,
        depth=4,
        heads=4,
        attn_dropout=0.1,
        ff_dropout=0.1,
    )
    batch = torch.randint(0, 16, (512, 10)), torch.randn(512, 10), torch.rand(512, 1).round()
    return Program(model, batch, loss, ("tab_transformer_pytorch",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Binary cross entropy."""
    categories, numbers, targets = batch
    return F.binary_cross_entropy_with_logits(model(categories, numbers), targets)
