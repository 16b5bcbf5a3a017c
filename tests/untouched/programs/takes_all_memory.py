"""A trace of it takes memory without end."""

import numpy as np
from parts import Small


class Model(Small):
    def loss(self, features, classes):
        held = []
        while next(self.parameters()).sum().item() == 0:  # as a trace reads it
            held.append(np.empty(2**28, dtype="uint8"))
        return super().loss(features, classes)
