"""Lines that the step prints, by `print` and past Python."""

import os
import sys

from parts import Small


class Model(Small):
    def loss(self, features, classes):
        print("user: a step")
        sys.stdout.flush()
        os.write(1, b"user: a step by its descriptor\n")
        return super().loss(features, classes)
