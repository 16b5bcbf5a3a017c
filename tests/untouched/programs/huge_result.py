"""A module whose name is so long that a prediction of it takes megabytes."""

from parts import Small
from torch import nn


class Model(Small):
    def __init__(self):
        super().__init__()
        self.net.add_module("x" * 300_000, nn.Linear(2, 2))
