"""Sentence pairs with MultipleNegativesRankingLoss on a small BERT (sentence_transformers)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, models
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import BertConfig, BertModel, BertTokenizerFast

from programs import Program


def encoder() -> SentenceTransformer:
    """BERT of 4 layers with random weights, the mean over its tokens."""
    config = BertConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=4000,
    )
    with tempfile.TemporaryDirectory() as folder:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(3995))]
        Path(folder, "vocab.txt").write_text("\n".join(words))
        BertModel(config).save_pretrained(folder)
        BertTokenizerFast(str(Path(folder, "vocab.txt"))).save_pretrained(folder)
        words_to_vectors = models.Transformer(folder, max_seq_length=128)
    return SentenceTransformer(modules=[words_to_vectors, models.Pooling(256)], device="cpu")


def features(num_tokens: int) -> dict[str, torch.Tensor]:
    """32 tokenized sentences."""
    tokens = torch.randint(5, 4000, (32, num_tokens))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss of pairs of a question and its answer."""
    own: torch.Tensor = MultipleNegativesRankingLoss(model)([dict(one) for one in batch], None)
    return own


def make() -> Program:
    """32 questions of 24 tokens with answers of 96."""
    batch = [features(24), features(96)]
    return Program(encoder(), batch, loss, ("sentence_transformers", "transformers"))
