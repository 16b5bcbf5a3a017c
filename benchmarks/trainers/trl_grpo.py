"""Group relative policy optimization: answers are generated inside of the step (TRL)."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trainers import Trained, _virtual, arguments, by_callback, llama, text, tokenizer

LIBRARIES = ("trl", "transformers")
NUM_TOKENS = 32


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Longer is better."""
    return [float(len(one)) for one in completions]


def make(**options: Any) -> GRPOTrainer:
    """4 answers of 32 tokens to a prompt of 16."""
    trainer = GRPOTrainer(
        model=llama(),
        reward_funcs=rewards,
        args=GRPOConfig(
            **arguments(
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=NUM_TOKENS,
            )
        ),
        train_dataset=Dataset.from_list([{"prompt": text(i, 16)} for i in range(64)]),
        processing_class=tokenizer(),
        **options,
    )
    _virtual.completions_come_from_the_host(trainer, NUM_TOKENS)
    return trainer


def train() -> Trained:
    """Train it."""
    _virtual.every_position_is_scored()
    _virtual.generation_ends(NUM_TOKENS)
    return by_callback(make)
