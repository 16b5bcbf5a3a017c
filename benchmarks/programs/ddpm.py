"""Denoising diffusion of images with an average of the weights (denoising-diffusion-pytorch)."""

from __future__ import annotations

from typing import Any

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet
from ema_pytorch import EMA

from programs import Program


def make() -> Program:
    """A UNet of width 32 that predicts the noise, 8 images of 64 x 64, bf16 autocast."""
    unet = Unet(dim=32, dim_mults=(1, 2, 4), flash_attn=False)
    model = GaussianDiffusion(unet, image_size=64, timesteps=1000)
    average = EMA(model, beta=0.995, include_online_model=False)
    return Program(
        model,
        torch.rand(8, 3, 64, 64),
        loss,
        ("denoising_diffusion_pytorch", "ema_pytorch"),
        precision="bf16-mixed",
        also=(average,),
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss that the wrapper computes."""
    own: torch.Tensor = model(batch)
    return own
