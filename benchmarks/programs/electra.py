"""ELECTRA: a generator of tokens and a discriminator, trained together (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from programs import Program


def config(width: int) -> ElectraConfig:
    """4 layers; the embeddings have the same width in both."""
    return ElectraConfig(
        vocab_size=8000,
        embedding_size=128,
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=256,
    )


class Both(nn.Module):
    """The generator and the discriminator share their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = ElectraForMaskedLM(config(64))
        self.discriminator = ElectraForPreTraining(config(256))
        self.generator.electra.embeddings = self.discriminator.electra.embeddings
        self.generator.tie_weights()


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The generator's cross entropy and 50 times the discriminator's."""
    tokens, chosen = batch["tokens"], batch["chosen"]
    logits = model.generator(input_ids=torch.where(chosen, 4, tokens)).logits
    of_generator = F.cross_entropy(
        logits.flatten(0, 1), torch.where(chosen, tokens, -100).flatten()
    )
    with torch.no_grad():
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-9, 1 - 1e-6)))
        made = torch.where(chosen, (logits + noise).argmax(-1), tokens)
    found = model.discriminator(input_ids=made).logits
    total: torch.Tensor = of_generator + 50 * F.binary_cross_entropy_with_logits(
        found, (made != tokens).float()
    )
    return total


def make() -> Program:
    """Widths of 64 and 256, 16 sequences of 128 tokens."""
    batch = {
        "tokens": torch.randint(5, 8000, (16, 128)),
        "chosen": torch.rand(16, 128) < 0.15,
    }
    return Program(Both(), batch, loss, ("transformers",))
