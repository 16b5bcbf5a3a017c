"""Mamba-1 in the path of plain PyTorch (transformers)."""

from __future__ import annotations

import torch
from transformers import MambaConfig, MambaForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """2 layers of width 128, 4 sequences of 64 tokens."""
    config = MambaConfig(
        vocab_size=2000, hidden_size=128, num_hidden_layers=2, state_size=16, use_mambapy=False
    )
    tokens = torch.randint(3, 2000, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return Program(MambaForCausalLM(config), batch, own_loss, ("transformers",))
