"""BigBird with block-sparse attention, for classes of documents (transformers)."""

from __future__ import annotations

import torch
from transformers import BigBirdConfig, BigBirdForSequenceClassification

from programs import Program, own_loss


def make() -> Program:
    """2 layers of width 256, 2 documents of 512 tokens in blocks of 32."""
    config = BigBirdConfig(
        vocab_size=4000,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=512,
        attention_type="block_sparse",
        block_size=32,
        num_random_blocks=2,
        num_labels=5,
    )
    tokens = torch.randint(3, 4000, (2, 512))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.tensor([1, 3]),
    }
    return Program(BigBirdForSequenceClassification(config), batch, own_loss, ("transformers",))
