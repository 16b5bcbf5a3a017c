"""Pairs of sentences ranked among each other, as MultipleNegativesRankingLoss does it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from programs import Program


def make() -> Program:
    """BERT of 3 layers, 32 pairs of 64 tokens."""
    config = BertConfig(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=2000,
    )
    tokens = torch.randint(3, 2000, (32, 64))
    batch = {"first": tokens, "second": tokens.clone(), "mask": torch.ones_like(tokens)}
    return Program(BertModel(config), batch, loss, ("transformers",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Each first sentence is to be nearest to its second one."""
    first, second = (
        model(input_ids=batch[name], attention_mask=batch["mask"]).last_hidden_state.mean(1)
        for name in ("first", "second")
    )
    scores = 20 * F.normalize(first) @ F.normalize(second).T
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
