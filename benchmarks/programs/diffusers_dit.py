"""Diffusion: a transformer of image and text tokens, trained by flow matching (diffusers)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The weighted error of the predicted velocity."""
    latents = batch["latents"]
    noise = torch.randn_like(latents)
    sigmas = compute_density_for_timestep_sampling(
        "logit_normal", len(latents), 0.0, 1.0, device=latents.device
    )
    scale = sigmas.view(-1, 1, 1, 1)
    velocity = model(
        hidden_states=(1 - scale) * latents + scale * noise,
        timestep=1000 * sigmas,
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
    ).sample
    weights = compute_loss_weighting_for_sd3("logit_normal", scale)
    error: torch.Tensor = (weights * (velocity - (noise - latents)) ** 2).mean()
    return error


def make() -> Program:
    """SD3 of 4 layers of width 256, with gradient checkpointing and bf16 autocast."""
    model = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=256,
        caption_projection_dim=256,
        pooled_projection_dim=128,
        out_channels=4,
        pos_embed_max_size=32,
    )
    model.enable_gradient_checkpointing()
    batch = {
        "latents": torch.randn(4, 4, 32, 32),
        "text": torch.randn(4, 77, 256),
        "pooled": torch.randn(4, 128),
    }
    return Program(model, batch, loss, ("diffusers",), precision="bf16-mixed")
