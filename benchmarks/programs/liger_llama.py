"""Llama with fused kernels in Triton: linear cross entropy, RMSNorm, rope, SwiGLU (Liger)."""

from __future__ import annotations

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """Llama of 4 layers, bf16 autocast, 4 sequences of 256 tokens."""
    apply_liger_kernel_to_llama()
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
        LlamaForCausalLM(config),
        {"input_ids": tokens, "labels": tokens.clone()},
        own_loss,
        ("transformers", "liger-kernel"),
        precision="bf16-mixed",
    )
