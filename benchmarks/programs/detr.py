"""DETR: boxes matched to queries on the host (transformers)."""

from __future__ import annotations

import torch
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

from programs import Program, own_loss


def make() -> Program:
    """DETR of 2 layers each way on a small ResNet, 2 images of 224 x 224 with two boxes each."""
    backbone = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 1, 1, 1],
        out_features=["stage4"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        backbone=None,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        num_queries=20,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        num_labels=5,
    )
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.1]])
    batch = {
        "pixel_values": torch.randn(2, 3, 224, 224),
        "pixel_mask": torch.ones(2, 224, 224, dtype=torch.long),
        "labels": [{"class_labels": torch.tensor([1, 2]), "boxes": boxes} for _ in range(2)],
    }
    return Program(DetrForObjectDetection(config), batch, own_loss, ("transformers", "scipy"))
