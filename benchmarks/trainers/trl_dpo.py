"""Pairs of answers against a frozen reference: direct preference optimization (TRL)."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from trainers import Trained, _virtual, arguments, by_callback, llama, text, tokenizer

LIBRARIES = ("trl", "transformers")


def make(**options: Any) -> DPOTrainer:
    """4 prompts of 16 tokens with two answers of 40."""
    rows = [
        {
            "prompt": text(i, 16),
            "chosen": " " + text(i + 9, 40),
            "rejected": " " + text(i + 5, 40),
        }
        for i in range(64)
    ]
    return DPOTrainer(
        model=llama(),
        ref_model=llama(),
        args=DPOConfig(**arguments(per_device_train_batch_size=4, max_length=64)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        **options,
    )


def train() -> Trained:
    """Train it."""
    _virtual.every_position_is_scored()
    return by_callback(make)
