"""Llama with Liger's Triton kernels, checkpointed, two batches to an update (transformers)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from trainers import Trained, arguments, by_callback, llama

LIBRARIES = ("transformers", "liger_kernel")


def make(**options: Any) -> Trainer:
    """4 texts of 128 tokens."""
    tokens = torch.randint(3, 2000, (64, 128))
    return Trainer(
        model=llama(),
        args=TrainingArguments(
            **arguments(
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                activation_checkpointing=True,
                use_liger_kernel=True,
            )
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        **options,
    )


def train() -> Trained:
    """Train it."""
    return by_callback(make)
