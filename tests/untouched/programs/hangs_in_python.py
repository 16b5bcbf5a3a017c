"""A trace of it runs for ever in Python."""

from parts import Small


class Model(Small):
    def loss(self, features, classes):
        if next(self.parameters()).sum().item() == 0:  # as a trace reads it
            while True:
                pass
        return super().loss(features, classes)
