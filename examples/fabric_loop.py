"""The digits of `examples/plain_loop.py` in a loop of Lightning Fabric.

    python examples/fabric_loop.py

First install its packages: `pip install '.[examples]'` in the clone.

Fabric wraps models and optimizers; the recorder watches the wrappers, which the loop calls. The
prediction is of the model itself, in Fabric's precision. It cannot be of the wrapper, because a
prediction calls `loss.backward()`, and a loss of the wrapper's output needs `fabric.backward`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.fabric import Fabric
from plain_loop import Batch, data, loss_of, network
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network with Lightning Fabric and record its memory."
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    return parser.parse_args()


def main() -> None:
    """Predict, train, compare."""
    options = arguments()
    torch.manual_seed(0)
    fabric = Fabric(devices=1, precision=options.precision)
    fabric.launch()
    images, digits = data()[0]
    own_model = network()
    model, optimizer = fabric.setup(own_model, torch.optim.Adam(own_model.parameters(), lr=0.001))
    loader: DataLoader[Batch] = DataLoader(
        TensorDataset(images, digits), options.batch_size, shuffle=True, drop_last=True
    )
    batches: Any = fabric.setup_dataloaders(loader)

    recorder = mc.MemoryRecorder(model, optimizer)
    recorder.watch()
    batch = next(iter(batches))
    mc.MemoryLog(
        recorder,
        mc.TrainingStep(
            own_model,
            batch,
            loss=loss_of,
            optimizer=optimizer,
            precision=options.precision,
            keep_batch=True,  # the loader moves the next one to the device before `batch` lets go
        ),
    )
    for _ in range(options.epochs):
        for batch in batches:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch))
            optimizer.step()
    recorder.close()


if __name__ == "__main__":
    main()
