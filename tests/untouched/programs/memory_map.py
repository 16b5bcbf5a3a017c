"""A file mapped into memory that the step writes to."""

from contextlib import contextmanager

import numpy as np
from parts import Small

HELD = {}


@contextmanager
def around():
    np.zeros(16).tofile("counts.bin")
    HELD["counts"] = np.memmap("counts.bin", dtype="float64", mode="r+")
    yield
    HELD["counts"].flush()


class Model(Small):
    def __init__(self):
        super().__init__()
        self.counts = HELD["counts"]

    def loss(self, features, classes):
        self.counts[0] += 1
        HELD["counts"][1] += 2
        return super().loss(features * (1 + HELD["counts"][1] / 100), classes)
