"""A convolutional network on 1,797 handwritten digits, with MemoryCallback.

One line of code, the callback, records the memory.

    python examples/digits.py

First install its packages: `pip install '.[examples]'` in the clone.

The images come with scikit-learn, so nothing is downloaded. It runs on a GPU where there is one,
else on the CPU, and leaves its curves in `lightning_logs`; the report says how to open them.
`examples/plain_loop.py` does the same without Lightning.
"""

from __future__ import annotations

import argparse
import logging

import torch
from lightning.fabric.utilities.data import suggested_max_num_workers
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from memcallback import MemoryCallback

Batch = tuple[Tensor, ...]  # images and their digits

NUM_CLASSES = 10
NUM_VALIDATION_IMAGES = 360


class DigitsNet(LightningModule):
    """Three convolutions, and two linear layers, which have most of the parameters.

    The convolutions work at 16 x 16 and 8 x 8.
    """

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear"),
            *convolution(1, 32),
            *convolution(32, 64),
            nn.MaxPool2d(2),
            *convolution(64, 64),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 1024),
            nn.ReLU(),
            nn.Linear(1024, NUM_CLASSES),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, digits = batch
        loss = nn.functional.cross_entropy(self.network(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The share of digits that are read correctly."""
        images, digits = batch
        is_right = self.network(images).argmax(dim=1) == digits
        self.log("val_accuracy", is_right.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, which keeps two values for each parameter."""
        return torch.optim.Adam(self.parameters(), lr=0.001)


def convolution(num_inputs: int, num_outputs: int) -> tuple[nn.Module, ...]:
    """A convolution that keeps height and width, with its normalisation and activation."""
    return (
        nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
    )


def loaders(batch_size: int) -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    """Batches for training and for validation.

    Images of shape (batch_size, 1, 8, 8), 0 to 1, and their digits.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, validation = random_split(
        dataset, [len(dataset) - NUM_VALIDATION_IMAGES, NUM_VALIDATION_IMAGES]
    )
    num_workers = min(2, suggested_max_num_workers(1))
    return (
        DataLoader(
            train,
            batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=True,
        ),
        DataLoader(validation, batch_size, num_workers=num_workers, persistent_workers=True),
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits and record its memory."
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also predict what each saving of memory would buy",
    )
    parser.add_argument("--per-module", action="store_true", help="record by module too")
    parser.add_argument("--log-dir", default=".", help="the folder in which lightning_logs is made")
    return parser.parse_args()


def main() -> None:
    """Train, and say what came of it."""
    options = arguments()
    # Lightning's advertisements are log messages of level INFO; its warnings stay.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0, workers=True, verbose=False)
    train, validation = loaders(options.batch_size)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=options.epochs,
        default_root_dir=options.log_dir,
        log_every_n_steps=2,  # few steps in all, and enough points for a curve
        enable_model_summary=False,
        callbacks=[MemoryCallback(what_if=options.what_if, per_module=options.per_module)],
    )
    trainer.fit(DigitsNet(), train, validation)
    print(f"Validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
