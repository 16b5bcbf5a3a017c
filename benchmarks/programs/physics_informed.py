"""A network of doubles that is to satisfy the Poisson equation (DeepXDE)."""

from __future__ import annotations

import os
from typing import Any

import torch

os.environ["DDE_BACKEND"] = "pytorch"
import deepxde

from programs import Program


def make() -> Program:
    """4 hidden layers of width 64, 8192 points inside and 1024 at the edge."""
    torch.set_default_device("cpu")  # DeepXDE takes CUDA, for the steps that Adam counts as well
    deepxde.config.set_default_float("float64")
    model = deepxde.nn.pytorch.FNN([2] + 4 * [64] + [1], "tanh", "Glorot normal")
    batch = {
        "inside": torch.rand(8192, 2, dtype=torch.float64),
        "edge": torch.rand(1024, 2, dtype=torch.float64).round(),
    }
    return Program(model, batch, loss, ("deepxde",), optimizer=torch.optim.Adam)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The Laplacian is -1 inside, the solution 0 at the edge."""
    points = batch["inside"].requires_grad_()
    solution = model(points)
    laplacian = sum(deepxde.grad.hessian(solution, points, i=i, j=i) for i in range(2))
    deepxde.gradients.clear()
    at_edge = model(batch["edge"])
    total: torch.Tensor = (laplacian + 1).square().mean() + at_edge.square().mean()
    return total
