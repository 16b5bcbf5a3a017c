"""WavLM for classes of sounds, attention with gated relative positions (transformers)."""

from __future__ import annotations

import torch
from transformers import WavLMConfig, WavLMForSequenceClassification

from programs import Program, own_loss


def make() -> Program:
    """3 layers of width 192, 4 clips of one second, the feature encoder frozen."""
    config = WavLMConfig(
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=768,
        conv_dim=(128,) * 7,
        num_conv_pos_embeddings=64,
        num_conv_pos_embedding_groups=8,
        mask_time_prob=0.0,
        layerdrop=0.0,
        num_labels=12,
        use_weighted_layer_sum=True,
    )
    model = WavLMForSequenceClassification(config)
    model.freeze_feature_encoder()
    batch = {"input_values": torch.randn(4, 16_000), "labels": torch.randint(12, (4,))}
    return Program(model, batch, own_loss, ("transformers",))
