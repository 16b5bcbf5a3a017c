"""Proximal policy optimization on a minibatch of stored frames (stable-baselines3)."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticCnnPolicy
from torch.nn import functional as F

from programs import Program


def make() -> Program:
    """The policy for Atari, 64 stacks of 4 frames of 84 x 84, as `PPO.train` updates it."""
    policy = ActorCriticCnnPolicy(
        spaces.Box(0, 255, (4, 84, 84), dtype="uint8"), spaces.Discrete(6), lambda _: 2.5e-4
    )
    batch = {
        "observations": torch.randint(0, 255, (64, 4, 84, 84), dtype=torch.uint8),
        "actions": torch.randint(0, 6, (64,)),
        "old_log_prob": torch.full((64,), -1.8),
        "advantages": torch.randn(64),
        "returns": torch.randn(64),
    }
    return Program(policy, batch, loss, ("stable-baselines3", "gymnasium"), optimizer=adam)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """The default of the library."""
    return torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The clipped ratio, the value's error and the entropy."""
    values, log_prob, entropy = model.evaluate_actions(batch["observations"], batch["actions"])
    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = torch.exp(log_prob - batch["old_log_prob"])
    clipped = ratio.clamp(0.8, 1.2)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
    value_loss = F.mse_loss(batch["returns"], values.flatten())
    total: torch.Tensor = policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss
    return total
