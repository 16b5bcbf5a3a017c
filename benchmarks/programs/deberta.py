"""DeBERTa: attention with relative positions, for masked tokens (transformers)."""

from __future__ import annotations

import torch
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

from programs import Program, own_loss


def make() -> Program:
    """4 layers of width 256, 8 sequences of 128 tokens, bf16 autocast."""
    config = DebertaV2Config(
        vocab_size=8000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        relative_attention=True,
        position_buckets=64,
        pos_att_type=["p2c", "c2p"],
    )
    tokens = torch.randint(5, 8000, (8, 128))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.where(torch.rand(8, 128) < 0.15, tokens, -100),
    }
    return Program(
        DebertaV2ForMaskedLM(config), batch, own_loss, ("transformers",), precision="bf16-mixed"
    )
