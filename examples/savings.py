"""Three ways to train in less memory, in a plain PyTorch loop.

Gradient accumulation, mixed precision, checkpointing.

    python examples/savings.py

First install its packages: `pip install '.[examples]'` in the clone.

None is on by default. The step is first predicted without and with all three. Then a network is
trained on the digits of `examples/plain_loop.py` with all three, and the recorder shows how much
memory that took. `mc.what_if(step)` would predict each of them, and more, alone and together.
"""

from __future__ import annotations

import argparse

import torch
from plain_loop import NUM_CLASSES, Batch, accuracy, data, loss_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memcallback as mc

#: The precision of Ampere GPUs and later, and of CPUs; older GPUs have `16-mixed`.
PRECISION = "bf16-mixed"
ACCUMULATE = 4
NUM_BLOCKS, WIDTH = 6, 64


class Block(nn.Module):
    """A perceptron of two layers, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, width) to the same."""
        changed: Tensor = self.perceptron(self.norm(x))
        return x + changed


def network() -> nn.Sequential:
    """A pixel is a feature; most memory is in what the blocks save for the backward pass."""
    return nn.Sequential(
        nn.Flatten(),
        *(Block() for _ in range(NUM_BLOCKS)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, NUM_CLASSES),
    )


def train(
    model: nn.Module, batches: DataLoader[Batch], device: torch.device, epochs: int
) -> mc.MemoryRecorder:
    """Train with all three savings, and record the memory."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    num_updates = epochs * -(-len(batches) // ACCUMULATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.004, total_steps=num_updates
    )
    amp = mc.amp(PRECISION, device=device)
    accumulation = mc.accumulate(ACCUMULATE, model, optimizer, amp=amp)
    recorder = mc.MemoryRecorder(model, optimizer)
    with mc.checkpoint(model):
        for _ in range(epochs):
            for on_host in accumulation.over(batches):
                batch = on_host[0].to(device), on_host[1].to(device)
                with recorder.step(batch):
                    with recorder.phase(mc.Phase.FORWARD), amp.autocast():
                        loss = loss_of(model, batch)
                    with recorder.phase(mc.Phase.BACKWARD):
                        accumulation.backward(loss)
                    with recorder.phase(mc.Phase.OPTIMIZER_STEP):
                        is_updated = accumulation.step(clip_grad_norm=1.0)
                if is_updated:
                    scheduler.step()
    recorder.close()
    return recorder


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits in less memory, and see how much "
        "less."
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512, help="images for each update")
    return parser.parse_args()


def main() -> None:
    """Predict the step without and with the savings, train, and compare."""
    options = arguments()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, validation = data()
    model = network().to(device)

    whole_batch = [tensor[: options.batch_size].to(device) for tensor in training]
    step = mc.TrainingStep(
        model, whole_batch, loss=loss_of, optimizer=torch.optim.Adam, clip_grad_norm=1.0
    )
    here = "cpu" if device.type == "cpu" else None  # None: the CUDA device that is here
    before = mc.predict(step, device=here).peak_allocated_bytes
    with mc.checkpoint(model):
        changed = step.varied(accumulate=ACCUMULATE, has_accumulation=True, precision=PRECISION)
        micro_batch_size = options.batch_size // ACCUMULATE
        predicted = mc.predict(
            changed, device=here, batch_size=micro_batch_size
        ).peak_allocated_bytes
    print(
        f"Predicted peak: {mc.format_bytes(before)} without savings, "
        f"{mc.format_bytes(predicted)} with all three."
    )

    batches = DataLoader(TensorDataset(*training), micro_batch_size, shuffle=True)
    recorder = train(model, batches, device, options.epochs)

    assert recorder.largest is not None
    measured = recorder.largest.peak_allocated_bytes or 0
    print(
        f"Peak with all three: {mc.format_bytes(measured)} measured, "
        f"{mc.format_bytes(predicted)} predicted."
    )
    print(
        f"Validation accuracy: {accuracy(model, *(tensor.to(device) for tensor in validation)):.3f}"
    )


if __name__ == "__main__":
    main()
