"""SAM: the mask decoder is trained, the vision encoder is frozen (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig
from transformers import SamVisionConfig as VisionConfig

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The cross entropy of the masks' pixels."""
    masks = model(
        pixel_values=batch["pixel_values"],
        input_boxes=batch["input_boxes"],
        multimask_output=False,
    ).pred_masks
    return F.binary_cross_entropy_with_logits(masks.flatten(0, 2), batch["masks"])


def make() -> Program:
    """A vision encoder of 4 layers of width 128, 2 images of 256 x 256 with a box each."""
    vision = VisionConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=256,
        output_channels=64,
        window_size=7,
        global_attn_indexes=[1, 3],
        mlp_dim=512,
        num_pos_feats=32,
    )
    prompts = SamPromptEncoderConfig(hidden_size=64, image_size=256, image_embedding_size=16)
    decoder = SamMaskDecoderConfig(hidden_size=64, mlp_dim=256, num_attention_heads=4)
    config = SamConfig(
        vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder
    )
    model = SamModel(config)
    model.vision_encoder.requires_grad_(False)
    model.prompt_encoder.requires_grad_(False)
    batch = {
        "pixel_values": torch.randn(2, 3, 256, 256),
        "input_boxes": torch.tensor([[[20.0, 30.0, 200.0, 220.0]]]).repeat(2, 1, 1),
        "masks": torch.randint(2, (2, 64, 64)).float(),
    }
    return Program(model, batch, loss, ("transformers",))
