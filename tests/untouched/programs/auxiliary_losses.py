"""Layers that put losses of their own into a global list; the step adds and clears them."""

import torch
from parts import Small

LOSSES = []
NUM_SEEN = {"losses": 0}


class Model(Small):
    def forward(self, features):
        hidden = self.net[1](self.net[0](features))
        LOSSES.append(hidden.pow(2).mean())
        return self.net[2](hidden)

    def loss(self, features, classes):
        loss = super().loss(features, classes) + 0.1 * torch.stack(LOSSES).sum()
        NUM_SEEN["losses"] += len(LOSSES)
        LOSSES.clear()
        return loss
