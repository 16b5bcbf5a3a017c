"""RoBERTa for classes of tokens, with padding (transformers)."""

from __future__ import annotations

import torch
from transformers import RobertaConfig, RobertaForTokenClassification

from programs import Program, own_loss


def make() -> Program:
    """4 layers of width 384, 12 sentences of up to 160 tokens, bf16 autocast."""
    config = RobertaConfig(
        vocab_size=10000,
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=1536,
        max_position_embeddings=514,
        type_vocab_size=1,
        num_labels=9,
    )
    lengths = torch.tensor([160, 151, 140, 133, 120, 111, 97, 88, 76, 60, 43, 31])
    mask = (torch.arange(160)[None] < lengths[:, None]).long()
    batch = {
        "input_ids": torch.where(mask.bool(), torch.randint(3, 10000, (12, 160)), 1),
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), torch.randint(0, 9, (12, 160)), -100),
    }
    return Program(
        RobertaForTokenClassification(config),
        batch,
        own_loss,
        ("transformers",),
        precision="bf16-mixed",
    )
