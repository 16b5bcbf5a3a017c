"""A loop until a value that is read is large enough: on placeholders it never ends."""

import torch
from parts import Small


class Model(Small):
    def loss(self, features, classes):
        noise = torch.rand(())
        while noise.item() < 2:
            noise = noise + 0.7
        loss = super().loss(features * noise.to(features.device), classes)
        while loss.item() > 1:
            loss = loss / 2
        return loss
