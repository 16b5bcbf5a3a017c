"""A counter in memory that processes share."""

import multiprocessing

from parts import Small

NUM_CALLS = multiprocessing.Value("i", 0)


class Model(Small):
    def loss(self, features, classes):
        with NUM_CALLS.get_lock():
            NUM_CALLS.value += 1
        return super().loss(features * (1 + NUM_CALLS.value / 100), classes)
