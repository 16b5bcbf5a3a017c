"""Training steps as users of other libraries write them; `make()` of a file gives a `Program`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass
class Program:
    """A training step.

    Attributes:
        model: The model, on the host.
        batch: One batch, on the host.
        loss: From the model and the batch to the loss.
        libraries: The distributions that it is made of, for their versions.
        optimizer: From the trained parameters to an optimizer.
        precision: As for `memcallback.TrainingStep`: `32-true` or `bf16-mixed`.
        also: What is on the device beside the model.
        needs_values: Whether its path depends on values that the device computes. A virtual device
            computes zeros: there it is predicted and not measured.
    """

    model: torch.nn.Module
    batch: Any
    loss: Loss
    libraries: tuple[str, ...]
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    precision: str = "32-true"
    also: tuple[Any, ...] = ()
    needs_values: bool = False


def names() -> list[str]:
    """The programs' names."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss that a model of transformers returns."""
    loss: torch.Tensor = model(**batch).loss
    return loss
