"""A `queue.Queue` that a producer has filled with exactly what the training takes."""

import queue

import torch
from parts import Small

NOISE = queue.Queue()
TAKEN = []


class Model(Small):
    def __init__(self):
        super().__init__()
        for number in range(12):
            NOISE.put(torch.full((8,), number / 100))

    def loss(self, features, classes):
        noise = NOISE.get()
        TAKEN.append(float(noise[0]))
        return super().loss(features + noise.to(features.device), classes)
