"""`KeyboardInterrupt` where a value says that the training has failed."""

import torch
from parts import Small


class Model(Small):
    def loss(self, features, classes):
        if torch.rand(()).item() == 0:  # as a trace reads it
            raise KeyboardInterrupt
        return super().loss(features, classes)
