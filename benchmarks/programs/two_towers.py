"""Words and images in two towers, ranked among each other (transformers' CLIP)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from programs import Program


def make() -> Program:
    """4 layers each, 16 images of 128 x 128 with 32 tokens each, checkpointed."""
    size = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = CLIPConfig(
        text_config=CLIPTextConfig(**size, vocab_size=4000, eos_token_id=3999).to_dict(),
        vision_config=CLIPVisionConfig(**size, image_size=128, patch_size=16).to_dict(),
    )
    model = CLIPModel(config)
    model.gradient_checkpointing_enable()
    tokens = torch.randint(3, 3999, (16, 32))
    tokens[:, -1] = 3999
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(16, 3, 128, 128),
    }
    return Program(model, batch, loss, ("transformers",), precision="bf16-mixed")


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The contrastive loss that the model returns."""
    own: torch.Tensor = model(**batch, return_loss=True).loss
    return own
