"""Mamba with its scan in plain PyTorch (mambapy)."""

from __future__ import annotations

from typing import Any

import torch
from mambapy.lm import LM
from mambapy.mamba import MambaConfig
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """4 layers of width 256, 4 sequences of 128 tokens, bf16 autocast."""
    model = LM(MambaConfig(d_model=256, n_layers=4), vocab_size=4000)
    tokens = torch.randint(4000, (4, 129))
    return Program(model, tokens, loss, ("mambapy",), precision="bf16-mixed")


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of the next token."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
