"""SigLIP: images and texts, each pair judged by a sigmoid (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import SiglipConfig, SiglipModel

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The model's own."""
    total: torch.Tensor = model(**batch, return_loss=True).loss
    return total


def make() -> Program:
    """4 layers of width 256 each, 16 pairs, bf16 autocast."""
    both = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = SiglipConfig(
        text_config={**both, "vocab_size": 8000, "max_position_embeddings": 64},
        vision_config={**both, "image_size": 128, "patch_size": 16},
    )
    batch = {
        "input_ids": torch.randint(3, 8000, (16, 64)),
        "pixel_values": torch.randn(16, 3, 128, 128),
    }
    return Program(SiglipModel(config), batch, loss, ("transformers",), precision="bf16-mixed")
