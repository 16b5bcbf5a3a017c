"""Pairs of sentences ranked among each other by the library's Trainer (sentence-transformers)."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from programs.sentence_ranking import encoder
from sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss

from trainers import Trained, arguments, by_callback

LIBRARIES = ("sentence_transformers", "transformers")


def numbers(first: int, length: int) -> str:
    """Words of the encoder's vocabulary."""
    return " ".join(str((7 * first + i) % 3900) for i in range(length))


def make(**options: Any) -> SentenceTransformerTrainer:
    """32 questions of 20 words with answers of 60."""
    model = encoder()
    rows = [{"anchor": numbers(i, 20), "positive": numbers(i + 9, 60)} for i in range(192)]
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**arguments(per_device_train_batch_size=32)),
        train_dataset=Dataset.from_list(rows),
        loss=MultipleNegativesRankingLoss(model),
        **options,
    )


def train() -> Trained:
    """Train it."""
    return by_callback(make)
