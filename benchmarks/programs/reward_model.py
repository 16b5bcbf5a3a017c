"""Llama that learns which of two answers is better (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, LlamaConfig

from programs import Program


def make() -> Program:
    """3 layers of width 384, 4 pairs of 128 tokens, padded, bf16 autocast."""
    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=4000,
        num_labels=1,
        pad_token_id=0,
    )
    tokens = torch.randint(3, 4000, (8, 128))
    tokens[::2, 96:] = 0
    batch = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    model = AutoModelForSequenceClassification.from_config(config)
    return Program(model, batch, loss, ("transformers",), precision="bf16-mixed")


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The first half is better."""
    better, worse = model(**batch).logits.chunk(2)
    return -F.logsigmoid(better - worse).mean()
