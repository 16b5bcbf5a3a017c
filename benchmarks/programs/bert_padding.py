"""BERT for masked tokens, with padding in the batch (transformers)."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForMaskedLM

from programs import Program, own_loss


def make() -> Program:
    """BERT of 3 layers, 8 sequences of up to 128 tokens."""
    config = BertConfig(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=2000,
    )
    tokens = torch.randint(3, 2000, (8, 128))
    mask = torch.ones_like(tokens)
    mask[1:, 100:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}
    # transformers looks whether the mask is all ones.
    return Program(BertForMaskedLM(config), batch, own_loss, ("transformers",), needs_values=True)
