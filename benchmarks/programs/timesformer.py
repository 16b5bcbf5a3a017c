"""TimeSformer: attention over time, then over space, on clips (transformers)."""

from __future__ import annotations

import torch
from transformers import TimesformerConfig, TimesformerForVideoClassification

from programs import Program, own_loss


def make() -> Program:
    """4 layers of width 192, 4 clips of 8 frames of 96 x 96, bf16 autocast."""
    config = TimesformerConfig(
        image_size=96,
        patch_size=16,
        num_frames=8,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=20,
    )
    batch = {"pixel_values": torch.randn(4, 8, 3, 96, 96), "labels": torch.randint(0, 20, (4,))}
    return Program(
        TimesformerForVideoClassification(config),
        batch,
        own_loss,
        ("transformers",),
        precision="bf16-mixed",
    )
