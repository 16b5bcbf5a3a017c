"""Double DQN with a target network on stored frames (plain PyTorch)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from programs import Program


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Adam that clips the gradients before each step."""
    parameters = list(parameters)
    optimizer = torch.optim.Adam(parameters, lr=6.25e-5, eps=1.5e-4)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(parameters, 10.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def make() -> Program:
    """The network for Atari, 32 transitions of 4 frames of 84 x 84."""
    network = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 6),
    )
    target = deepcopy(network).requires_grad_(False)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        frames, later = batch["frames"].float() / 255, batch["later"].float() / 255
        values = model(frames).gather(1, batch["actions"][:, None]).squeeze(1)
        with torch.no_grad():
            best = model(later).argmax(1, keepdim=True)
            future = target(later).gather(1, best).squeeze(1)
            wanted = batch["rewards"] + 0.99 * future * (1 - batch["ends"])
        return F.smooth_l1_loss(values, wanted)

    batch = {
        "frames": torch.randint(0, 255, (32, 4, 84, 84), dtype=torch.uint8),
        "later": torch.randint(0, 255, (32, 4, 84, 84), dtype=torch.uint8),
        "actions": torch.randint(0, 6, (32,)),
        "rewards": torch.randn(32),
        "ends": torch.zeros(32),
    }
    return Program(network, batch, loss, ("torch",), optimizer=adam)
