"""Diffusion: a small UNet learns the noise that a DDPM scheduler adds (diffusers)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.nn import functional as F

from programs import Program

scheduler = DDPMScheduler(num_train_timesteps=1000)


def unet() -> UNet2DConditionModel:
    """A UNet of about 10 million parameters."""
    return UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128, 256),
        layers_per_block=1,
        cross_attention_dim=128,
        attention_head_dim=8,
        norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )


def inputs() -> dict[str, torch.Tensor]:
    """4 latents of 32 x 32 with texts of 77 tokens."""
    return {"latents": torch.randn(4, 4, 32, 32), "text": torch.randn(4, 77, 128)}


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The squared error of the predicted noise."""
    latents = batch["latents"]
    noise = torch.randn_like(latents)
    steps = torch.randint(0, 1000, (len(latents),), device=latents.device)
    noisy = scheduler.add_noise(latents, noise, steps)
    predicted = model(noisy, steps, encoder_hidden_states=batch["text"]).sample
    return F.mse_loss(predicted, noise)


def make() -> Program:
    """All weights are trained."""
    return Program(unet(), inputs(), loss, ("diffusers",))
