"""The best weights are saved by `torch.save`, over those of an earlier training."""

from contextlib import contextmanager

import torch
from parts import Small


@contextmanager
def around():
    torch.save({"loss": 0.3, "weights": torch.arange(3.0)}, "best.pt")
    yield
    assert torch.load("best.pt")["loss"] <= 0.3


class Model(Small):
    def loss(self, features, classes):
        loss = super().loss(features, classes)
        if loss.item() < torch.load("best.pt")["loss"]:
            torch.save({"loss": loss.item(), "weights": self.net.state_dict()}, "best.pt")
        return loss
