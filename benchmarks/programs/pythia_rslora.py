"""GPT-NeoX, as of Pythia, with rank-stabilized LoRA (transformers, peft)."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """4 layers of width 512, 4 sequences of 256 tokens, bf16 autocast."""
    config = GPTNeoXConfig(
        vocab_size=10048,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
    )
    lora = LoraConfig(
        r=32,
        lora_alpha=16,
        lora_dropout=0.1,
        use_rslora=True,
        target_modules=["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
        task_type="CAUSAL_LM",
    )
    tokens = torch.randint(3, 10000, (4, 256))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.clone(),
    }
    return Program(
        get_peft_model(GPTNeoXForCausalLM(config), lora),
        batch,
        own_loss,
        ("transformers", "peft"),
        precision="bf16-mixed",
    )
