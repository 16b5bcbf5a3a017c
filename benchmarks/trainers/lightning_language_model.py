"""A language model with a schedule and an average of its weights (Lightning)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.nn import functional as F

from trainers import NUM_UPDATES, NUM_WORDS, Trained, by_lightning

LIBRARIES = ("lightning",)
BATCH_SIZE, LENGTH, WIDTH = 16, 256, 384


class LanguageModel(LightningModule):
    """A transformer whose head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 6, 4 * WIDTH, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (words,) = batch
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        hidden = self.layers(self.embedding(words), mask=mask, is_causal=True)
        logits = self.head(hidden[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        self.log("perplexity", loss.exp(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=NUM_UPDATES + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train() -> Trained:
    """16 sequences of 256 words, bf16, clipped gradients."""
    words = torch.randint(0, NUM_WORDS, (6 * BATCH_SIZE, LENGTH))
    return by_lightning(
        LanguageModel(),
        words,
        BATCH_SIZE,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        callbacks=[EMAWeightAveraging()],
    )
