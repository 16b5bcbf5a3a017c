"""BART from padded sources to summaries, with smoothed labels (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import BartConfig, BartForConditionalGeneration

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy with label smoothing."""
    logits = model(**batch, use_cache=False).logits
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, label_smoothing=0.1
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that clips the gradients before each step, as trainers do."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=3e-5, weight_decay=0.01)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def make() -> Program:
    """3 layers each way of width 256, 6 sources of 320 tokens, summaries of 64."""
    config = BartConfig(
        vocab_size=8000,
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_position_embeddings=512,
    )
    mask = torch.ones(6, 320, dtype=torch.long)
    mask[::2, 250:] = 0
    batch = {
        "input_ids": torch.randint(4, 8000, (6, 320)),
        "attention_mask": mask,
        "labels": torch.randint(4, 8000, (6, 64)),
    }
    return Program(
        BartForConditionalGeneration(config),
        batch,
        loss,
        ("transformers",),
        optimizer=adamw,
        precision="bf16-mixed",
        # Whether the mask of the decoder is all ones, it asks the device.
        needs_values=True,
    )
