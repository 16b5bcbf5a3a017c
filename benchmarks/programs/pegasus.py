"""Pegasus with Adafactor (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Adafactor, PegasusConfig, PegasusForConditionalGeneration

from programs import Program, own_loss


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """With a fixed rate, as for summaries."""
    optimizer: torch.optim.Optimizer = Adafactor(
        parameters, lr=1e-4, scale_parameter=False, relative_step=False, warmup_init=False
    )
    return optimizer


def make() -> Program:
    """3 layers each way of width 256, 4 texts of 384 tokens, bf16 autocast."""
    config = PegasusConfig(
        vocab_size=10000,
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_position_embeddings=512,
    )
    tokens = torch.randint(4, 10000, (4, 384))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.randint(4, 10000, (4, 64)),
    }
    return Program(
        PegasusForConditionalGeneration(config),
        batch,
        own_loss,
        ("transformers",),
        optimizer=adafactor,
        precision="bf16-mixed",
    )
