"""Llama with an AdamW of 8-bit state (bitsandbytes)."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """Llama of 4 layers in bfloat16, 4 sequences of 256 tokens."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8000,
    )
    tokens = torch.randint(3, 8000, (4, 256))
    return Program(
        LlamaForCausalLM(config).bfloat16(),
        {"input_ids": tokens, "labels": tokens.clone()},
        own_loss,
        ("transformers", "bitsandbytes"),
        optimizer=bnb.optim.AdamW8bit,
    )
