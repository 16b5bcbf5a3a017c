"""Diffusion: consistency distillation of a teacher, with an averaged target (diffusers)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DModel

from programs import Program

alphas = DDPMScheduler(num_train_timesteps=1000).alphas_cumprod


def make() -> Program:
    """3 levels of 32 to 128 channels, 8 images of 32 x 32, pseudo-Huber loss."""
    student = UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64, 128),
        norm_num_groups=16,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    teacher = deepcopy(student).requires_grad_(False)
    target = deepcopy(student).requires_grad_(False)

    def loss(model: Any, images: Any) -> torch.Tensor:
        with torch.no_grad():
            for average, one in zip(target.parameters(), model.parameters(), strict=True):
                average.lerp_(one, 0.05)
        table = alphas.to(images.device)
        later = torch.randint(20, 1000, (len(images),), device=images.device)
        earlier = later - 20
        a, b = table[later].view(-1, 1, 1, 1), table[earlier].view(-1, 1, 1, 1)
        noisy = a.sqrt() * images + (1 - a).sqrt() * torch.randn_like(images)
        skip, out = 0.25 / (1 - a + 0.25), (1 - a).sqrt() / (1.25 - a).sqrt()
        clean = (noisy - (1 - a).sqrt() * model(noisy, later).sample) / a.sqrt()
        made = skip * noisy + out * clean
        with torch.no_grad():
            noise = teacher(noisy, later).sample
            start = (noisy - (1 - a).sqrt() * noise) / a.sqrt()
            before = b.sqrt() * start + (1 - b).sqrt() * noise
            skip, out = 0.25 / (1 - b + 0.25), (1 - b).sqrt() / (1.25 - b).sqrt()
            clean = (before - (1 - b).sqrt() * target(before, earlier).sample) / b.sqrt()
            wanted = skip * before + out * clean
        error: torch.Tensor = (((made - wanted) ** 2 + 1e-6).sqrt() - 1e-3).mean()
        return error

    return Program(
        student,
        torch.randn(8, 3, 32, 32),
        loss,
        ("diffusers",),
        optimizer=lambda parameters: torch.optim.RAdam(parameters, lr=1e-4),
    )
