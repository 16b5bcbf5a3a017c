"""An attribute that removes its folder in `__del__`."""

import os
import shutil

from parts import Small


class Scratch:
    def __init__(self):
        self.path = "scratch"
        os.makedirs(self.path)
        with open("scratch/table", "w") as file:
            file.write("8")

    def __del__(self):
        shutil.rmtree(self.path)


SIZES = []


class Model(Small):
    def __init__(self):
        super().__init__()
        self.scratch = Scratch()

    def loss(self, features, classes):
        with open("scratch/table") as file:
            SIZES.append(int(file.read()))
        return super().loss(features[:, : SIZES[-1]], classes)
