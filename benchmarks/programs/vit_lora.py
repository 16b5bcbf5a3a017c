"""A vision transformer with LoRA and a head that is trained whole (transformers, peft)."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import ViTConfig, ViTForImageClassification

from programs import Program, own_loss


def make() -> Program:
    """6 layers of width 384, 8 images of 160 x 160."""
    config = ViTConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=160,
        patch_size=16,
        num_labels=101,
    )
    model = ViTForImageClassification(config)
    leaves = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    names = ("query", "value") if "query" in leaves else ("q_proj", "v_proj")
    lora = LoraConfig(
        r=16,
        lora_alpha=16,
        lora_dropout=0.1,
        bias="none",
        target_modules=list(names),
        modules_to_save=["classifier"],
    )
    batch = {"pixel_values": torch.randn(8, 3, 160, 160), "labels": torch.randint(0, 101, (8,))}
    return Program(get_peft_model(model, lora), batch, own_loss, ("transformers", "peft"))
