"""Falcon with one key for all heads, and Lion of 8-bit state (transformers, bitsandbytes)."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from transformers import FalconConfig, FalconForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """4 layers of width 512, bf16 autocast, 4 sequences of 256 tokens."""
    config = FalconConfig(
        vocab_size=8000,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        multi_query=True,
        parallel_attn=True,
        bias=False,
        hidden_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokens = torch.randint(3, 8000, (4, 256))
    return Program(
        FalconForCausalLM(config),
        {"input_ids": tokens, "labels": tokens.clone()},
        own_loss,
        ("transformers", "bitsandbytes"),
        optimizer=bnb.optim.Lion8bit,
        precision="bf16-mixed",
    )
