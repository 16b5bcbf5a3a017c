"""Small Lightning modules, each named for what it tests, and a Trainer that is quiet."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_FEATURES, NUM_HIDDEN, NUM_CLASSES = 64, 256, 10


def network():
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, NUM_HIDDEN),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(NUM_HIDDEN, NUM_CLASSES),
    )


class Automatic(LightningModule):
    """The usual module: Lightning runs the loop."""

    def __init__(self, optimizer=torch.optim.Adam):
        super().__init__()
        self.network = network()
        self.make_optimizer = optimizer

    def forward(self, features):
        return self.network(features)

    def training_step(self, batch, batch_idx):
        features, classes = batch
        loss = nn.functional.cross_entropy(self.network(features), classes)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters(), lr=0.01)


class ManualTwoOptimizers(Automatic):
    """Two optimizers in one batch, through Lightning's own calls."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.network[0].parameters(), lr=0.01),
            torch.optim.Adam(self.network[3].parameters()),
        ]


class ManualTwoBackwards(Automatic):
    """Two losses, each with a backward pass, then one update."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in (0, 1):
            self.manual_backward(
                nn.functional.cross_entropy(self.network(batch[0][half::2]), batch[1][half::2])
            )
        optimizer.step()


class ManualRaw(Automatic):
    """Torch's optimizer and a bare loss.backward(): Lightning sees neither."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class SkipsOddBatches(Automatic):
    """A training_step that returns None."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class OverflowsOnce(Automatic):
    """A loss of inf in the second batch, so that a GradScaler skips its update."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 else loss


def loader(num_batches=4, batch_size=8):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_batches * batch_size, NUM_FEATURES, generator=generator)
    classes = torch.randint(0, NUM_CLASSES, (num_batches * batch_size,), generator=generator)
    return DataLoader(TensorDataset(features, classes), batch_size=batch_size)


def trainer(tmp_path, callbacks=(), **options):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "default_root_dir": tmp_path,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "log_every_n_steps": 1,
    }
    return Trainer(callbacks=list(callbacks), **(defaults | options))
