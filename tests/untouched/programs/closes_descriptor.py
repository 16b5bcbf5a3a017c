"""An attribute that closes a file descriptor in `__del__`."""

import os

from parts import Small


class Log:
    def __init__(self, path):
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def line(self, text):
        os.write(self.descriptor, f"{text}\n".encode())

    def __del__(self):
        os.close(self.descriptor)


class Model(Small):
    def __init__(self):
        super().__init__()
        self.lines = Log("lines.txt")

    def loss(self, features, classes):
        self.lines.line(f"a step of {len(features)} samples")
        return super().loss(features, classes)
