"""A Python generator that the step takes its noise from."""

import torch
from parts import Small


def numbers():
    number = 0
    while number < 12:
        yield number
        number += 1


NUMBERS = numbers()


class Model(Small):
    def loss(self, features, classes):
        noise = torch.full((8,), next(NUMBERS) / 100)
        return super().loss(features + noise.to(features.device), classes)
