"""A loop on a random value: on placeholders it never ends."""

import torch
from parts import Small


class Model(Small):
    def loss(self, features, classes):
        while torch.rand(()).item() < 0.2:
            features = features * 1.01
        return super().loss(features, classes)
