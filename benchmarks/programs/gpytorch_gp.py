"""A Gaussian process on learned features, by inducing points and the ELBO (GPyTorch)."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import nn

from programs import Program


class Process(gpytorch.models.ApproximateGP):
    """A process of a feature network's outputs, and the likelihood of its values."""

    def __init__(self) -> None:
        points = torch.randn(256, 8)
        distribution = CholeskyVariationalDistribution(len(points))
        super().__init__(VariationalStrategy(self, points, distribution))
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=8))
        self.features = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 8))
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, points: torch.Tensor) -> Any:
        """The prior at some points."""
        return gpytorch.distributions.MultivariateNormal(self.mean(points), self.kernel(points))


def make() -> Program:
    """256 inducing points, 1024 samples of 32 numbers."""
    batch = torch.randn(1024, 32), torch.randn(1024)
    return Program(Process(), batch, loss, ("gpytorch", "linear_operator"), needs_values=True)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Less the lower bound of the evidence."""
    samples, values = batch
    bound = gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data=10_000)
    total: torch.Tensor = -bound(model(model.features(samples)), values)
    return total
