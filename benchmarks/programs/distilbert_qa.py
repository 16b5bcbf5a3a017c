"""DistilBERT for spans of answers, with padding (transformers)."""

from __future__ import annotations

import torch
from transformers import DistilBertConfig, DistilBertForQuestionAnswering

from programs import Program, own_loss


def make() -> Program:
    """3 layers of width 384, 8 texts of up to 256 tokens."""
    config = DistilBertConfig(
        vocab_size=10000, dim=384, n_layers=3, n_heads=6, hidden_dim=1536, qa_dropout=0.1
    )
    lengths = torch.tensor([256, 250, 230, 211, 190, 170, 144, 101])
    mask = (torch.arange(256)[None] < lengths[:, None]).long()
    batch = {
        "input_ids": torch.randint(3, 10000, (8, 256)) * mask,
        "attention_mask": mask,
        "start_positions": torch.randint(0, 50, (8,)),
        "end_positions": torch.randint(50, 100, (8,)),
    }
    return Program(DistilBertForQuestionAnswering(config), batch, own_loss, ("transformers",))
