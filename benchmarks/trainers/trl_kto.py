"""Answers that are good or bad, against a frozen reference: Kahneman-Tversky (TRL)."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import KTOConfig, KTOTrainer

from trainers import Trained, _virtual, arguments, by_callback, llama, text, tokenizer

LIBRARIES = ("trl", "transformers")


def make(**options: Any) -> KTOTrainer:
    """4 prompts of 16 tokens with answers of 40."""
    rows = [
        {"prompt": text(i, 16), "completion": " " + text(i + 5, 40), "label": bool(i % 2)}
        for i in range(64)
    ]
    return KTOTrainer(
        model=llama(),
        ref_model=llama(),
        args=KTOConfig(**arguments(per_device_train_batch_size=4, max_length=64)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        **options,
    )


def train() -> Trained:
    """Train it."""
    _virtual.every_position_is_scored()
    _virtual.counts_are_the_largest()
    return by_callback(make)
