"""Diffusion: LoRA adapters of a frozen UNet, as DreamBooth trains them (diffusers, peft)."""

from __future__ import annotations

import torch
from peft import LoraConfig

from programs import Program
from programs.diffusers_unet import inputs, loss, unet


def make() -> Program:
    """Adapters of rank 8 on the attention of the UNet, bf16 autocast."""
    model = unet().requires_grad_(False)
    lora = LoraConfig(
        r=8,
        lora_alpha=8,
        init_lora_weights="gaussian",
        target_modules=["to_k", "to_q", "to_v", "to_out.0"],
    )
    model.add_adapter(lora)
    return Program(
        model,
        inputs(),
        loss,
        ("diffusers", "peft"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        precision="bf16-mixed",
    )
