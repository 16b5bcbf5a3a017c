"""`os._exit` where a value says that the training has failed: no handler sees it."""

import os

from parts import Small


class Model(Small):
    def loss(self, features, classes):
        if next(self.parameters()).sum().item() == 0:  # as a trace reads it
            os._exit(4)
        return super().loss(features, classes)
