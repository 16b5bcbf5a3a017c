"""A small Llama, as of SmolLM, in bfloat16 on packed sequences (transformers)."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from programs import Program, own_loss


def make() -> Program:
    """6 layers of width 576, 2 rows of 512 tokens of several sequences each."""
    config = LlamaConfig(
        vocab_size=12000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    rows = [[200, 180, 132], [300, 96, 116]]
    owner = torch.stack(
        [torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)) for lengths in rows]
    )
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]
    )
    same = owner[:, :, None] == owner[:, None, :]
    mask = (same & torch.ones(512, 512, dtype=torch.bool).tril())[:, None]
    tokens = torch.randint(3, 12000, (2, 512))
    batch = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": positions,
        "labels": torch.where(positions == 0, -100, tokens),
    }
    return Program(LlamaForCausalLM(config).bfloat16(), batch, own_loss, ("transformers",))
