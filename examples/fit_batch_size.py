"""The largest batch that fits, found before training.

The size is predicted, then run. Everything but the batch size stays as it was.

    python examples/fit_batch_size.py

On a GPU its memory is the limit; on a CPU a limit is given. `MemoryCallback(fit_batch_size=True)`
does the same at the start of a fit.
"""

from __future__ import annotations

import argparse
import logging

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc

NUM_CLASSES = 10


class Network(LightningModule):
    """Layers of 1,024 units; the module makes its loader with its own batch size."""

    def __init__(self, batch_size: int, num_images: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * 16, 1024),
            nn.LayerNorm(1024),
            nn.GELU(),
            nn.Linear(1024, 1024),
            nn.GELU(),
            nn.Linear(1024, NUM_CLASSES),
        )
        self.images = torch.rand(num_images, 1, 16, 16)
        self.classes = torch.randint(0, NUM_CLASSES, (num_images,))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The images, shuffled, in batches of `self.batch_size`."""
        return DataLoader(
            TensorDataset(self.images, self.classes), batch_size=self.batch_size, shuffle=True
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, classes = batch
        return nn.functional.cross_entropy(self.network(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, whose state is twice the parameters."""
        return torch.optim.Adam(self.parameters())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Find the largest batch size that fits, and train with it."
    )
    parser.add_argument("--batch-size", type=int, default=8, help="the size to begin with")
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument(
        "--capacity",
        default=None,
        help="the memory to plan for; by default the GPU's, on a CPU 64MiB",
    )
    return parser.parse_args()


def main() -> None:
    """Find the batch size, say what was tried, train with it."""
    options = arguments()
    # Lightning's advertisements are log messages of level INFO; its warnings stay.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0, verbose=False)
    capacity = options.capacity or (None if torch.cuda.is_available() else "64MiB")
    module = Network(options.batch_size, options.images)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    weights = [parameter.clone() for parameter in module.parameters()]
    found = mc.fit_batch_size(trainer, module, capacity=capacity)
    print(found.to_text())
    is_same = all(
        torch.equal(parameter, before)
        for parameter, before in zip(module.parameters(), weights, strict=True)
    )
    print(
        f"Weights are {'as before' if is_same else 'others'}, optimizer updates made: "
        f"{trainer.global_step}."
    )
    trainer.fit(module)
    print(f"Trained {trainer.global_step} steps of {module.batch_size} images.")


if __name__ == "__main__":
    main()
