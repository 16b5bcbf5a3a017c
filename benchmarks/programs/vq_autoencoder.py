"""An autoencoder whose codes are quantized in residual steps (vector-quantize-pytorch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vector_quantize_pytorch import ResidualVQ

from programs import Program


class Autoencoder(nn.Module):
    """Convolutions, codes, convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 64, 4, 2, 1), nn.GELU(), nn.Conv2d(64, 128, 4, 2, 1)
        )
        self.codes = ResidualVQ(dim=128, num_quantizers=4, codebook_size=512)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(64, 3, 4, 2, 1)
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The images again, and the loss of the codes."""
        encoded = self.encoder(images)
        quantized, _, losses = self.codes(encoded.flatten(2).transpose(1, 2))
        return self.decoder(quantized.transpose(1, 2).reshape(encoded.shape)), losses.sum()


def make() -> Program:
    """4 codebooks of 512 codes, 16 images of 64 x 64."""
    return Program(
        Autoencoder(),
        torch.randn(16, 3, 64, 64),
        loss,
        ("vector_quantize_pytorch",),
        needs_values=True,
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    """How far the images are from the given ones, and the codes from the encoder."""
    images, of_codes = model(batch)
    total: torch.Tensor = F.mse_loss(images, batch) + of_codes
    return total
