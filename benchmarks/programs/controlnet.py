"""Diffusion: a ControlNet beside a frozen UNet in bfloat16 (diffusers)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ControlNetModel, DDPMScheduler, UNet2DConditionModel
from torch.nn import functional as F

from programs import Program

scheduler = DDPMScheduler(num_train_timesteps=1000)


def make() -> Program:
    """3 levels of 32 to 128 channels, 4 latents of 32 x 32, bf16 autocast."""
    unet = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64, 128),
        layers_per_block=2,
        cross_attention_dim=96,
        attention_head_dim=8,
        norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )
    control = ControlNetModel.from_unet(unet, conditioning_channels=3)
    unet = unet.requires_grad_(False).to(torch.bfloat16)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        steps = torch.randint(0, 1000, (len(latents),), device=latents.device)
        noisy = scheduler.add_noise(latents, noise, steps)
        down, middle = model(
            noisy,
            steps,
            encoder_hidden_states=batch["text"],
            controlnet_cond=batch["hints"],
            return_dict=False,
        )
        predicted = unet(
            noisy.to(torch.bfloat16),
            steps,
            encoder_hidden_states=batch["text"].to(torch.bfloat16),
            down_block_additional_residuals=[one.to(torch.bfloat16) for one in down],
            mid_block_additional_residual=middle.to(torch.bfloat16),
            return_dict=False,
        )[0]
        return F.mse_loss(predicted.float(), noise.float())

    batch = {
        "latents": torch.randn(4, 4, 32, 32),
        "text": torch.randn(4, 77, 96),
        "hints": torch.rand(4, 3, 256, 256),
    }
    return Program(control, batch, loss, ("diffusers",), precision="bf16-mixed")
