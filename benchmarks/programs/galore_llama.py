"""Llama whose gradients an AdamW projects to rank 32 (galore_torch)."""

from __future__ import annotations

from typing import Any

import torch
from galore_torch import GaLoreAdamW
from transformers import LlamaConfig, LlamaForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """Llama of 2 layers, 4 sequences of 128 tokens."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=4000,
    )
    tokens = torch.randint(3, 4000, (4, 128))
    return Program(
        LlamaForCausalLM(config),
        {"input_ids": tokens, "labels": tokens.clone()},
        own_loss,
        ("transformers", "galore-torch"),
        optimizer=galore,
    )


def galore(parameters: Any) -> torch.optim.Optimizer:
    """GaLore for the layers' matrices, not for the embedding and the head, which are large."""
    parameters = list(parameters)
    projected = [one for one in parameters if one.ndim == 2 and len(one) < 4000]
    others = [one for one in parameters if one.ndim != 2 or len(one) >= 4000]
    groups = [
        {"params": others},
        {
            "params": projected,
            "rank": 32,
            "update_proj_gap": 200,
            "scale": 0.25,
            "proj_type": "std",
        },
    ]
    optimizer: torch.optim.Optimizer = GaLoreAdamW(groups, lr=1e-3, no_deprecation_warning=True)
    return optimizer
