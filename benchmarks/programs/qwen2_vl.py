"""Qwen2-VL: images of different sizes between the tokens of a text (transformers)."""

from __future__ import annotations

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from programs import Program, own_loss

VISION_START, IMAGE = 3, 5


def make() -> Program:
    """2 layers of text and 2 of vision, two sequences of 160 tokens with an image each."""
    config = Qwen2VLConfig(
        text_config={
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 2000,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={"depth": 2, "embed_dim": 128, "num_heads": 4, "hidden_size": 256},
        vision_start_token_id=VISION_START,
        vision_end_token_id=4,
        image_token_id=IMAGE,
        video_token_id=6,
    )
    grids = torch.tensor([[1, 16, 16], [1, 8, 24]])
    tokens = torch.randint(10, 2000, (2, 160))
    for row, grid in zip(tokens, grids, strict=True):
        row[4] = VISION_START
        row[5 : 5 + int(grid.prod()) // 4] = IMAGE
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(tokens == IMAGE, -100),
        "pixel_values": torch.randn(int(grids.prod(1).sum()), 3 * 2 * 14 * 14),
        "image_grid_thw": grids,
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }
    return Program(
        Qwen2VLForConditionalGeneration(config),
        batch,
        own_loss,
        ("transformers",),
        needs_values=True,
    )
