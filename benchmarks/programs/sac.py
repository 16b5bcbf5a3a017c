"""Soft actor-critic: two critics, the actor and the temperature in one loss (plain PyTorch)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.nn import functional as F

from programs import Program

STATES, ACTIONS = 376, 17


def mlp(before: int, after: int) -> nn.Sequential:
    """Two hidden layers of width 256."""
    return nn.Sequential(
        nn.Linear(before, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, after)
    )


class Agent(nn.Module):
    """The actor, the critics and the temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(STATES, 2 * ACTIONS)
        self.critics = nn.ModuleList(mlp(STATES + ACTIONS, 1) for _ in range(2))
        self.log_temperature = nn.Parameter(torch.zeros(1))

    def act(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions and the logarithms of their probabilities."""
        mean, log_scale = self.actor(states).chunk(2, dim=-1)
        normal = Normal(mean, log_scale.clamp(-20, 2).exp(), validate_args=False)
        tanh = TransformedDistribution(normal, [TanhTransform(cache_size=1)], validate_args=False)
        policy = Independent(tanh, 1, validate_args=False)
        actions = policy.rsample()
        return actions, policy.log_prob(actions)


def lowest(critics: Any, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """The lower of both critics' values."""
    both = torch.cat([states, actions], -1)
    return torch.minimum(*(critic(both).squeeze(-1) for critic in critics))


def make() -> Program:
    """256 transitions of 376 numbers and 17 actions."""
    agent = Agent()
    targets = deepcopy(agent.critics).requires_grad_(False)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        temperature = model.log_temperature.exp().detach()
        with torch.no_grad():
            actions, log_probability = model.act(batch["later"])
            future = lowest(targets, batch["later"], actions) - temperature * log_probability
            wanted = batch["rewards"] + 0.99 * (1 - batch["ends"]) * future
        both = torch.cat([batch["states"], batch["actions"]], -1)
        of_critics = sum(F.mse_loss(critic(both).squeeze(-1), wanted) for critic in model.critics)
        model.critics.requires_grad_(False)
        actions, log_probability = model.act(batch["states"])
        value = lowest(model.critics, batch["states"], actions)
        of_actor = (temperature * log_probability - value).mean()
        model.critics.requires_grad_(True)
        entropy = (log_probability - ACTIONS).detach()
        total: torch.Tensor = of_critics + of_actor - (model.log_temperature * entropy).mean()
        with torch.no_grad():
            for average, one in zip(targets.parameters(), model.critics.parameters(), strict=True):
                average.lerp_(one, 0.005)
        return total

    batch = {
        "states": torch.randn(256, STATES),
        "later": torch.randn(256, STATES),
        "actions": torch.rand(256, ACTIONS) * 2 - 1,
        "rewards": torch.randn(256),
        "ends": torch.zeros(256),
    }
    return Program(
        agent,
        batch,
        loss,
        ("torch",),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-4),
    )
