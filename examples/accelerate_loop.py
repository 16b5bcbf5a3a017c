"""The digits of `examples/plain_loop.py` with Hugging Face accelerate and accumulation.

    python examples/accelerate_loop.py

First install its packages: `pip install '.[examples]'` in the clone.

The recorder watches the model and the optimizer that accelerate returns, and the prediction uses
both. Each batch is a step; every fourth step makes an update, and so does the last of an epoch.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from plain_loop import Batch, data, loss_of, network
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc

ACCUMULATE = 4


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network with accelerate and record its memory."
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no")
    return parser.parse_args()


def main() -> None:
    """Predict, train, compare."""
    options = arguments()
    torch.manual_seed(0)
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision, gradient_accumulation_steps=ACCUMULATE
    )
    images, digits = data()[0]
    own_model = network()
    own_optimizer = torch.optim.Adam(own_model.parameters(), lr=0.001)
    loader: DataLoader[Batch] = DataLoader(
        TensorDataset(images, digits), options.batch_size, shuffle=True, drop_last=True
    )
    model, optimizer, batches = accelerator.prepare(own_model, own_optimizer, loader)

    recorder = mc.MemoryRecorder(model, optimizer)
    recorder.watch()
    step = mc.TrainingStep(
        model,
        next(iter(batches)),
        loss=loss_of,
        optimizer=optimizer,
        accumulate=ACCUMULATE,
        keep_batch=True,  # the loader moves the next batch to the device before `batch` lets go
    )
    mc.MemoryLog(recorder, step)
    for _ in range(options.epochs):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    recorder.close()


if __name__ == "__main__":
    main()
