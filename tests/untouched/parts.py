"""What the programs are made of: a small module, data, and counts of what ran."""

from __future__ import annotations

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_BATCHES, BATCH_SIZE, NUM_EPOCHS = 6, 4, 2

#: How often what ran in this process: it would count in a trace too.
COUNTS = {"steps": 0, "samples": 0}


class Samples(Dataset):
    """Vectors and classes; the vectors are different ones."""

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.features = torch.randn(NUM_BATCHES * BATCH_SIZE, 8, generator=generator)
        self.classes = torch.arange(NUM_BATCHES * BATCH_SIZE) % 2

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, index):
        COUNTS["samples"] += 1
        return self.features[index], self.classes[index]


def loader(**options):
    return DataLoader(Samples(), batch_size=BATCH_SIZE, **options)


class Small(L.LightningModule):
    """A module of two layers. Programs write `loss`, which also a plain loop calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, features):
        return self.net(features)

    def loss(self, features, classes):
        return nn.functional.cross_entropy(self(features), classes)

    def training_step(self, batch, batch_idx):
        COUNTS["steps"] += 1
        loss = self.loss(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)
