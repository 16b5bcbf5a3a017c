"""Qwen3, whose queries and keys have norms (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from programs import Program, own_loss


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Fused AdamW, which clips the gradients before each step."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def make() -> Program:
    """4 layers of width 512, 2 sequences of 512 tokens, bf16 autocast."""
    config = Qwen3Config(
        vocab_size=16000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    tokens = torch.randint(3, 16000, (2, 512))
    return Program(
        Qwen3ForCausalLM(config),
        {"input_ids": tokens, "labels": tokens.clone()},
        own_loss,
        ("transformers",),
        optimizer=fused,
        precision="bf16-mixed",
    )
