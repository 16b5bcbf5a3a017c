"""Speech with a CTC loss (plain PyTorch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from programs import Program


class Speech(nn.Module):
    """Spectrograms, transformer layers, letters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(80, 256, 3, padding=1)
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.letters = nn.Linear(256, 40)

    def forward(self, spectrograms: torch.Tensor) -> torch.Tensor:
        """Scores of letters, of shape (batch, frames, 40)."""
        features = self.convolution(spectrograms.transpose(1, 2)).transpose(1, 2)
        scores: torch.Tensor = self.letters(self.encoder(features))
        return scores


def make() -> Program:
    """8 clips of 200 frames with 20 letters each."""
    batch = {
        "spectrograms": torch.randn(8, 200, 80),
        "letters": torch.randint(1, 40, (8, 20)),
        "num_frames": torch.full((8,), 200),
        "num_letters": torch.full((8,), 20),
    }
    return Program(Speech(), batch, loss, ("torch",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Connectionist temporal classification."""
    scores = model(batch["spectrograms"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, batch["letters"], batch["num_frames"], batch["num_letters"])
