"""Qwen2 in bfloat16 with gradient checkpointing and a padded batch (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """6 layers of width 448, 4 sequences of up to 384 tokens, fused AdamW."""
    config = Qwen2Config(
        vocab_size=12000,
        hidden_size=448,
        intermediate_size=1216,
        num_hidden_layers=6,
        num_attention_heads=7,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).bfloat16()
    model.gradient_checkpointing_enable()
    lengths = torch.tensor([384, 300, 220, 150])
    mask = (torch.arange(384)[None] < lengths[:, None]).long()
    tokens = torch.randint(3, 12000, (4, 384))
    batch = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), tokens, -100),
    }
    return Program(model, batch, own_loss, ("transformers",), optimizer=fused)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that transformers' trainer takes."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
