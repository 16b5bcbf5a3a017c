"""Supervised fine-tuning of LoRA adapters (TRL, peft)."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from trainers import Trained, _virtual, arguments, by_callback, llama, text, tokenizer

LIBRARIES = ("trl", "peft", "transformers")


def make(**options: Any) -> SFTTrainer:
    """4 texts of 64 tokens."""
    return SFTTrainer(
        model=llama(),
        args=SFTConfig(**arguments(per_device_train_batch_size=4, max_length=64)),
        train_dataset=Dataset.from_list([{"text": text(i, 64)} for i in range(64)]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        **options,
    )


def train() -> Trained:
    """Train it."""
    _virtual.every_position_is_scored()
    return by_callback(make)
