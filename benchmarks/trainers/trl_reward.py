"""A reward model that learns which of two answers is better (TRL)."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from trainers import Trained, arguments, by_callback, llama_config, text, tokenizer

LIBRARIES = ("trl", "transformers")


def make(**options: Any) -> RewardTrainer:
    """4 pairs of answers of 57 tokens."""
    rows = [{"chosen": text(i, 56), "rejected": text(i + 5, 56)} for i in range(64)]
    return RewardTrainer(
        model=LlamaForSequenceClassification(llama_config(num_labels=1)),
        args=RewardConfig(**arguments(per_device_train_batch_size=4, max_length=64)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        **options,
    )


def train() -> Trained:
    """Train it."""
    return by_callback(make)
