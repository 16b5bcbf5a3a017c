"""Diffusion: a small Flux transformer, trained by flow matching with guidance (diffusers)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The error of the predicted velocity."""
    latents = batch["latents"]
    noise = torch.randn_like(latents)
    sigmas = torch.sigmoid(torch.randn(len(latents), device=latents.device))
    scale = sigmas.to(latents.dtype).view(-1, 1, 1)
    velocity = model(
        hidden_states=(1 - scale) * latents + scale * noise,
        timestep=sigmas.to(latents.dtype),
        guidance=torch.full((len(latents),), 3.5, device=latents.device),
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
        txt_ids=batch["text_ids"],
        img_ids=batch["image_ids"],
        return_dict=False,
    )[0]
    error: torch.Tensor = ((velocity.float() - (noise - latents).float()) ** 2).mean()
    return error


def make() -> Program:
    """2 layers of two streams and 4 of one, width 256, weights in bfloat16."""
    model = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=256,
        pooled_projection_dim=128,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    ).bfloat16()
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    image_ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3)
    batch = {
        "latents": torch.randn(4, 256, 64, dtype=torch.bfloat16),
        "text": torch.randn(4, 64, 256, dtype=torch.bfloat16),
        "pooled": torch.randn(4, 128, dtype=torch.bfloat16),
        "text_ids": torch.zeros(64, 3, dtype=torch.bfloat16),
        "image_ids": image_ids.to(torch.bfloat16),
    }
    return Program(model, batch, loss, ("diffusers",))
