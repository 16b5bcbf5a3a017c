"""A small language model in a Hugging Face Trainer, with MemoryTrainerCallback.

Nothing is downloaded.

    python examples/huggingface_trainer.py

First install its packages: `pip install '.[examples]'` in the clone.

The model is made from its configuration, and learns to count: each token is the one before it plus
one.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import memcallback as mc

VOCABULARY, LENGTH = 512, 64


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up; each starts at a token that follows from its index."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + index * 7) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens.clone()}


def model() -> LlamaForCausalLM:
    """Four blocks of width 128."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small language model in a Hugging Face Trainer and record its memory."
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--output", default="huggingface_logs")
    return parser.parse_args()


def main() -> None:
    """Train with the callback."""
    options = arguments()
    torch.manual_seed(0)
    trainer = Trainer(
        model=model(),
        args=TrainingArguments(
            output_dir=options.output,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            learning_rate=0.002,
            logging_steps=10,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Counting(),
        callbacks=[mc.MemoryTrainerCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
