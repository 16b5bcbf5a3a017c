"""Mixtral: a mixture of experts with the loss of its router (transformers)."""

from __future__ import annotations

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """3 layers of width 256 with 8 experts, two a token, 4 sequences of 128 tokens."""
    config = MixtralConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        vocab_size=4000,
        output_router_logits=True,
    )
    tokens = torch.randint(3, 4000, (4, 128))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return Program(
        MixtralForCausalLM(config), batch, own_loss, ("transformers",), precision="bf16-mixed"
    )
