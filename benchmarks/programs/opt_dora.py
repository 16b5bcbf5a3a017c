"""OPT with DoRA on its projections (peft)."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import OPTConfig, OPTForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """4 layers of width 512, bf16 autocast, 4 sequences of 200 tokens."""
    config = OPTConfig(
        vocab_size=8000,
        hidden_size=512,
        word_embed_proj_dim=512,
        ffn_dim=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=512,
    )
    dora = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        use_dora=True,
        target_modules=["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
        task_type="CAUSAL_LM",
    )
    tokens = torch.randint(3, 8000, (4, 200))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.clone(),
    }
    return Program(
        get_peft_model(OPTForCausalLM(config), dora),
        batch,
        own_loss,
        ("transformers", "peft"),
        precision="bf16-mixed",
    )
