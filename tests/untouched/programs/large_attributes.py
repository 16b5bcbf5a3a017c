"""A large array of NumPy's, a memory map and many dictionaries as attributes of the module."""

import numpy as np
from parts import Small

ARRAY_BYTES = 200 * 2**20


class Model(Small):
    def __init__(self):
        super().__init__()
        self.array = np.ones(ARRAY_BYTES, dtype="uint8")
        np.ones(1000).tofile("map.bin")
        self.map = np.memmap("map.bin", dtype="float64", mode="r+")
        self.rows = [{"row": row} for row in range(100_000)]

    def loss(self, features, classes):
        return super().loss(features * float(self.array[7] + self.map[7]), classes)
