"""GPT-2 by direct preference optimization against a frozen reference (transformers)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from programs import Program


def log_prob(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of each sequence."""
    scores = model(tokens).logits[:, :-1].log_softmax(-1)
    return scores.gather(2, tokens[:, 1:, None]).squeeze(2).sum(1)


def make() -> Program:
    """3 layers of width 256, 4 pairs of 128 tokens, bf16 autocast."""
    policy = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=3, n_head=4, vocab_size=4000))
    reference = copy.deepcopy(policy).requires_grad_(False).eval()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        with torch.no_grad():
            before = log_prob(reference, tokens)
        chosen, rejected = (log_prob(model, tokens) - before).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    batch = {name: torch.randint(0, 4000, (4, 128)) for name in ("chosen", "rejected")}
    return Program(policy, batch, loss, ("transformers",), precision="bf16-mixed")
