"""Which tensors came and went between two lines of a plain PyTorch loop: `mc.TensorDiff`.

    python examples/tensor_diff.py

The loop has the classic leak: it keeps each step's loss, and with it the graph of that step.
"""

from __future__ import annotations

import torch
from torch import nn

import memcallback as mc

NUM_STEPS = 3


def network() -> nn.Sequential:
    """Two convolutions at 32 x 32 and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 32 * 32, 10),
    )


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """What each part of a step brings and takes, between marks."""
    images = torch.rand(8, 3, 32, 32, device=device)
    diff = mc.TensorDiff(model, optimizer)
    diff.mark()
    loss = model(images).square().mean()
    print(diff.mark("after forward"))
    loss.backward()
    print(diff.mark("after backward"))
    optimizer.step()
    print(diff.mark("after the optimizer step"))


def several_steps(model: nn.Module, device: torch.device) -> None:
    """What is left when some steps are over: with a ledger, also where it was made."""
    losses = []
    with mc.TensorDiff(model, ledger=True) as diff:
        for _ in range(NUM_STEPS):
            images = torch.rand(8, 3, 32, 32, device=device)
            loss = model(images).square().mean()
            losses.append(
                loss
            )  # keeps the step's activations too: losses.append(loss.detach()) does not
    print(diff)


def main() -> None:
    """One step part by part, then several."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network().to(device)
    one_step(model, torch.optim.Adam(model.parameters()), device)
    several_steps(model, device)


if __name__ == "__main__":
    main()
