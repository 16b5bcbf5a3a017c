"""Mamba-2 in the path of plain PyTorch (transformers)."""

from __future__ import annotations

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """2 layers of width 128, 2 sequences of 128 tokens."""
    config = Mamba2Config(
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=32,
        state_size=32,
        n_groups=1,
        chunk_size=32,
        vocab_size=2000,
    )
    tokens = torch.randint(3, 2000, (2, 128))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return Program(Mamba2ForCausalLM(config), batch, own_loss, ("transformers",))
