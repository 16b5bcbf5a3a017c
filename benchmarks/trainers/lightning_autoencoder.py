"""Images come as bytes and are made noisy on the device; learns to restore them (Lightning)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from trainers import Trained, by_lightning

LIBRARIES = ("lightning",)
BATCH_SIZE, SIDE = 256, 64


class Autoencoder(LightningModule):
    """Layers to fewer numbers and back; its batch hook is Lightning's own place for such work.

    It has no convolutions, whose workspaces a virtual device does not know as a card does.
    """

    def __init__(self) -> None:
        super().__init__()
        size = 3 * SIDE * SIDE
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(size, 512), nn.SiLU())
        self.decoder = nn.Sequential(
            nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, size), nn.Unflatten(1, (3, SIDE, SIDE))
        )
        self.restored: list[torch.Tensor] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images = batch[0].float().div_(255)
        noisy = images + 0.1 * torch.randn_like(images) if self.trainer.training else images
        return noisy, images

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        noisy, images = batch
        loss = F.mse_loss(self.decoder(self.encoder(noisy)), images)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noisy, _ = batch
        self.restored.append(self.decoder(self.encoder(noisy)))

    def on_validation_epoch_end(self) -> None:
        self.restored.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train() -> Trained:
    """256 images of 64 x 64, fp16, clipped gradients; a validation that keeps what it restores."""
    images = torch.randint(0, 256, (4 * BATCH_SIZE, 3, SIDE, SIDE), dtype=torch.uint8)
    return by_lightning(
        Autoencoder(), images, BATCH_SIZE, precision="16-mixed", gradient_clip_val=1.0
    )
