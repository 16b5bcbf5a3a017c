"""A trace of it waits for ever in C."""

import time

from parts import Small


class Model(Small):
    def loss(self, features, classes):
        if next(self.parameters()).sum().item() == 0:  # as a trace reads it
            time.sleep(10**6)
        return super().loss(features, classes)
