"""Llama with LoRA on its projections (peft)."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """Llama of 4 layers, bf16 autocast, 4 sequences of 256 tokens."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8000,
    )
    lora = LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
    tokens = torch.randint(3, 8000, (4, 256))
    return Program(
        get_peft_model(LlamaForCausalLM(config), lora),
        {"input_ids": tokens, "labels": tokens.clone()},
        own_loss,
        ("transformers", "peft"),
        precision="bf16-mixed",
    )
