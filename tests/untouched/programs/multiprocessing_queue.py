"""A `multiprocessing.Queue` that the step takes from."""

import multiprocessing

from parts import Small

NUMBERS = multiprocessing.Queue()
TAKEN = []


class Model(Small):
    def __init__(self):
        super().__init__()
        for number in range(12):
            NUMBERS.put(number)

    def loss(self, features, classes):
        number = NUMBERS.get()
        TAKEN.append(number)
        return super().loss(features + number / 100, classes)
