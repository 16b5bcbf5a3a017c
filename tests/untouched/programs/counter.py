"""A counter of steps in the user's file, on which the learning depends."""

import itertools

from parts import Small

STEPS = itertools.count(1)


class Model(Small):
    def loss(self, features, classes):
        return super().loss(features, classes) / next(STEPS)
