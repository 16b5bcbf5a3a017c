"""A masked autoencoder on images (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from programs import Program, own_loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """As in the paper."""
    return torch.optim.AdamW(parameters, lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05)


def make() -> Program:
    """4 layers of width 192 and 2 of width 128, 16 images of 224 x 224, bf16 autocast."""
    config = ViTMAEConfig(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        decoder_hidden_size=128,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=512,
        norm_pix_loss=True,
    )
    return Program(
        ViTMAEForPreTraining(config),
        {"pixel_values": torch.randn(16, 3, 224, 224)},
        own_loss,
        ("transformers",),
        optimizer=adamw,
        precision="bf16-mixed",
    )
