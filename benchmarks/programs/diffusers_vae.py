"""The autoencoder of latent diffusion, with a Kullback-Leibler term (diffusers)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL
from torch.nn import functional as F

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The error of each picture, and of its latents' distribution."""
    posterior = model.encode(batch).latent_dist
    decoded = model.decode(posterior.sample()).sample
    return F.l1_loss(decoded, batch) + 1e-6 * posterior.kl().mean()


def make() -> Program:
    """3 levels of 32 to 128 channels, 4 images of 128 x 128."""
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 128),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=16,
    )
    model.enable_gradient_checkpointing()
    return Program(model, torch.randn(4, 3, 128, 128), loss, ("diffusers",))
