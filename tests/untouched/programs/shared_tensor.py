"""A tensor in shared memory that the step writes to by a view of NumPy's."""

import torch
from parts import Small

COUNTS = torch.zeros(4).share_memory_()
VIEW = COUNTS.numpy()


class Model(Small):
    def loss(self, features, classes):
        VIEW[0] += 1
        return super().loss(features * (1 + float(VIEW[0]) / 100), classes)
