"""`sys.exit` where a value says that the training has failed."""

import sys

from parts import Small


class Model(Small):
    def loss(self, features, classes):
        if next(self.parameters()).sum().item() == 0:  # as a trace reads it
            sys.exit(3)
        return super().loss(features, classes)
