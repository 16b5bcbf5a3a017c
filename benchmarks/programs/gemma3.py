"""Gemma 3 with sliding windows, weights in bfloat16, Adafactor (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Adafactor, Gemma3ForCausalLM, Gemma3TextConfig

from programs import Program, own_loss


def make() -> Program:
    """4 layers of width 384, every second with a window of 128; 4 sequences of 256 tokens."""
    config = Gemma3TextConfig(
        vocab_size=16000,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=96,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    tokens = torch.randint(3, 16000, (4, 256))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.clone(),
        "use_cache": False,
    }
    model = Gemma3ForCausalLM(config).bfloat16()
    return Program(model, batch, own_loss, ("transformers",), optimizer=adafactor)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """As transformers' trainer makes it."""
    return Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False)
