"""A trace of it waits for ever for a lock."""

import threading

from parts import Small

LOCK = threading.Lock()


class Model(Small):
    def loss(self, features, classes):
        with LOCK:
            if next(self.parameters()).sum().item() == 0:  # as a trace reads it
                LOCK.acquire()
        return super().loss(features, classes)
