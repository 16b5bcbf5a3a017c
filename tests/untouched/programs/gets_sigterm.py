"""The training gets SIGTERM while a trace of it hangs."""

import os
import signal
import time

from parts import COUNTS, Small


class Model(Small):
    def loss(self, features, classes):
        if next(self.parameters()).sum().item() == 0:  # as a trace reads it
            time.sleep(10**6)
        if COUNTS["steps"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(features, classes)
