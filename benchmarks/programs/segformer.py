"""SegFormer: each pixel's class from a pyramid of attention (transformers)."""

from __future__ import annotations

import torch
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from programs import Program, own_loss


def make() -> Program:
    """The smallest SegFormer, 4 images of 256 x 256 with 20 classes, bf16 autocast."""
    config = SegformerConfig(num_labels=20)
    batch = {
        "pixel_values": torch.randn(4, 3, 256, 256),
        "labels": torch.randint(0, 20, (4, 256, 256)),
    }
    return Program(
        SegformerForSemanticSegmentation(config),
        batch,
        own_loss,
        ("transformers",),
        precision="bf16-mixed",
    )
