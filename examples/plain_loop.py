"""The network and data of `examples/digits.py` in a plain PyTorch loop.

MemoryRecorder and MemoryLog take the place of MemoryCallback.

    python examples/plain_loop.py

First install its packages: `pip install '.[examples]'` in the clone.

The training loop stays as it would be without memcallback: the recorder watches it. The log
predicts a step before the first one runs, by tracing it without data. It prints prediction and
measurement side by side, and writes both to TensorBoard.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc

Batch = tuple[Tensor, ...]  # images and their digits

NUM_CLASSES = 10
NUM_VALIDATION_IMAGES = 360


def network() -> nn.Sequential:
    """Three convolutions, and two linear layers, which have most of the parameters.

    The convolutions work at 16 x 16 and 8 x 8.
    """
    return nn.Sequential(
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


def convolution(num_inputs: int, num_outputs: int) -> tuple[nn.Module, ...]:
    """A convolution that keeps height and width, with its normalisation and activation."""
    return (
        nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
    )


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch; used for the prediction and for the training."""
    images, digits = batch
    return nn.functional.cross_entropy(model(images), digits)


def data() -> tuple[Batch, Batch]:
    """Images of shape (number, 1, 8, 8), 0 to 1, and their digits: to train and to validate."""
    bundled = load_digits()
    order = torch.randperm(len(bundled.target))
    images = (torch.tensor(bundled.images, dtype=torch.float32).unsqueeze(1) / 16)[order]
    digits = torch.tensor(bundled.target)[order]
    return (
        (images[NUM_VALIDATION_IMAGES:], digits[NUM_VALIDATION_IMAGES:]),
        (images[:NUM_VALIDATION_IMAGES], digits[:NUM_VALIDATION_IMAGES]),
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[Batch],
    device: torch.device,
) -> None:
    """One epoch."""
    for on_host in batches:
        batch = on_host[0].to(device), on_host[1].to(device)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def accuracy(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    """The share of digits that are read correctly."""
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == digits).float().mean())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits in a plain loop and record its "
        "memory."
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    """Predict, train, compare."""
    options = arguments()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, validation = data()
    batches = DataLoader(TensorDataset(*training), options.batch_size, shuffle=True, drop_last=True)
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    batch = [tensor.to(device) for tensor in next(iter(batches))]
    recorder = mc.MemoryRecorder(model, optimizer)
    recorder.watch()
    log = mc.MemoryLog(recorder, mc.TrainingStep(model, batch, loss=loss_of, optimizer=optimizer))
    if log.prediction:
        print(
            "Before the first step: a peak of "
            f"{mc.format_bytes(log.prediction.peak_allocated_bytes)} is predicted.\n"
        )

    for _ in range(options.epochs):
        train(model, optimizer, batches, device)
    recorder.close()  # and with it the watch and the log

    print(
        f"Validation accuracy: {accuracy(model, *(tensor.to(device) for tensor in validation)):.3f}"
    )


if __name__ == "__main__":
    main()
