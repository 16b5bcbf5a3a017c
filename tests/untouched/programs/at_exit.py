"""The step registers what is to be done when the process ends."""

import atexit

from parts import Small


def write():
    with open("ends", "a") as file:
        file.write("an end\n")


class Model(Small):
    def loss(self, features, classes):
        atexit.register(write)
        return super().loss(features, classes)
