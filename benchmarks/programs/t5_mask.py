"""T5 with an attention mask of ones (transformers)."""

from __future__ import annotations

import torch
from transformers import T5Config, T5ForConditionalGeneration

from programs import Program, own_loss


def make() -> Program:
    """T5 of 3 layers each way, 4 sequences of 256 tokens to 64."""
    config = T5Config(
        d_model=256,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        vocab_size=2000,
        decoder_start_token_id=0,
    )
    tokens = torch.randint(3, 2000, (4, 256))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.randint(3, 2000, (4, 64)),
    }
    return Program(T5ForConditionalGeneration(config), batch, own_loss, ("transformers",))
