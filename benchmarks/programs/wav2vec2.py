"""Wav2Vec 2.0 on sound waves with a CTC loss (transformers)."""

from __future__ import annotations

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from programs import Program, own_loss


def make() -> Program:
    """3 layers of width 192, 4 clips of one second with 12 letters each."""
    config = Wav2Vec2Config(
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=768,
        conv_dim=(128,) * 7,
        num_conv_pos_embeddings=64,
        num_conv_pos_embedding_groups=8,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    batch = {
        "input_values": torch.randn(4, 16_000),
        "labels": torch.randint(1, 32, (4, 12)),
    }
    return Program(Wav2Vec2ForCTC(config), batch, own_loss, ("transformers",))
