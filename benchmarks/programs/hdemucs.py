"""Sources of music by Hybrid Demucs: spectrogram and wave, LSTM and attention (torchaudio)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torchaudio.models import HDemucs

from programs import Program


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The error of each source's wave."""
    mixed, sources = batch
    return F.l1_loss(model(mixed), sources)


def make() -> Program:
    """5 levels from 16 channels, 2 stereo clips of 2 s at 16 kHz."""
    model = HDemucs(["drums", "bass", "voice"], channels=16, nfft=2048, depth=5)
    batch = torch.randn(2, 2, 32_000), torch.randn(2, 3, 2, 32_000)
    return Program(model, batch, loss, ("torchaudio",), optimizer=torch.optim.Adam)
