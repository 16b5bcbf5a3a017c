"""A program that the step starts, and what it says."""

import subprocess

from parts import Small

SAID = []


class Model(Small):
    def loss(self, features, classes):
        subprocess.run(["true"], check=True)
        SAID.append(subprocess.check_output(["sh", "-c", "echo x >> lines; wc -l < lines"]).strip())
        return super().loss(features, classes)
