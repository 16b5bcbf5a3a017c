"""`KeyboardInterrupt` where a value says that the training has failed."""

from parts import Small


class Model(Small):
    def loss(self, features, classes):
        if next(self.parameters()).sum().item() == 0:  # as a trace reads it
            raise KeyboardInterrupt
        return super().loss(features, classes)
