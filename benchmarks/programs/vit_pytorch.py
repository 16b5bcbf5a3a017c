"""CrossViT: small and large patches that attend to each other (vit-pytorch)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from vit_pytorch.cross_vit import CrossViT

from programs import Program


def make() -> Program:
    """2 multi-scale layers, 8 images of 224 x 224, bf16 autocast."""
    model = CrossViT(
        image_size=224,
        num_classes=100,
        depth=2,
        sm_dim=96,
        sm_patch_size=16,
        sm_enc_depth=1,
        sm_enc_heads=4,
        sm_enc_mlp_dim=384,
        lg_dim=192,
        lg_patch_size=56,
        lg_enc_depth=2,
        lg_enc_heads=4,
        lg_enc_mlp_dim=768,
        cross_attn_depth=2,
        cross_attn_heads=4,
        dropout=0.1,
    )
    batch = torch.randn(8, 3, 224, 224), torch.randint(0, 100, (8,))
    return Program(model, batch, loss, ("vit-pytorch",), precision="bf16-mixed")


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)
