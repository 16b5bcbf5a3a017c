"""A Conformer with a CTC loss (conformer)."""

from __future__ import annotations

from typing import Any

import torch
from conformer import Conformer
from torch import nn
from torch.nn import functional as F

from programs import Program


class Speech(nn.Module):
    """Spectrograms, Conformer layers, letters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(80, 144)
        self.encoder = Conformer(144, depth=4, heads=4, dim_head=36, conv_dropout=0.1)
        self.letters = nn.Linear(144, 40)

    def forward(self, spectrograms: torch.Tensor) -> torch.Tensor:
        """Scores of letters, of shape (batch, frames, 40)."""
        scores: torch.Tensor = self.letters(self.encoder(self.features(spectrograms)))
        return scores


def make() -> Program:
    """4 layers, 8 clips of 200 frames with 20 letters each."""
    batch = {
        "spectrograms": torch.randn(8, 200, 80),
        "letters": torch.randint(1, 40, (8, 20)),
        "num_frames": torch.full((8,), 200),
        "num_letters": torch.full((8,), 20),
    }
    return Program(Speech(), batch, loss, ("conformer",))


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Connectionist temporal classification."""
    scores = model(batch["spectrograms"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, batch["letters"], batch["num_frames"], batch["num_letters"])
