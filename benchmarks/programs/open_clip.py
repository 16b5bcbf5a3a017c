"""CLIP on images and captions with its contrastive loss (open_clip_torch)."""

from __future__ import annotations

from typing import Any

import torch
from open_clip import CLIP, ClipLoss

from programs import Program


def make() -> Program:
    """3 layers each way, 16 images of 112 x 112 with captions of 32 tokens, bf16 autocast."""
    model = CLIP(
        embed_dim=256,
        vision_cfg={"image_size": 112, "layers": 3, "width": 256, "patch_size": 16},
        text_cfg={
            "context_length": 32,
            "vocab_size": 8000,
            "width": 256,
            "heads": 4,
            "layers": 3,
        },
    )
    batch = torch.randn(16, 3, 112, 112), torch.randint(1, 8000, (16, 32))
    return Program(model, batch, loss, ("open-clip-torch",), precision="bf16-mixed")


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Which image belongs to which caption."""
    total: torch.Tensor = ClipLoss()(*model(*batch))
    return total
