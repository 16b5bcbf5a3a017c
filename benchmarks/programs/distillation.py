"""A small transformer that learns from a large one, which the loss reaches by a variable."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

from programs import Program


def bert(width: int, num_layers: int) -> BertForSequenceClassification:
    """BERT for 10 classes."""
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        vocab_size=2000,
        num_labels=10,
    )
    return BertForSequenceClassification(config)


def make() -> Program:
    """4 layers of width 512 teach 2 of width 128, 16 sequences of 128 tokens."""
    teacher = bert(512, 4).requires_grad_(False).eval()

    def loss(model: Any, tokens: Any) -> torch.Tensor:
        with torch.no_grad():
            targets = teacher(tokens).logits.softmax(-1)
        return F.kl_div(model(tokens).logits.log_softmax(-1), targets, reduction="batchmean")

    return Program(bert(128, 2), torch.randint(3, 2000, (16, 128)), loss, ("transformers",))
