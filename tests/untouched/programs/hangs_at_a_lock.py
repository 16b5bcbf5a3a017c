"""A trace of it waits for ever for a lock."""

import threading

import torch
from parts import Small

LOCK = threading.Lock()


class Model(Small):
    def loss(self, features, classes):
        with LOCK:
            if torch.rand(()).item() == 0:  # as a trace reads it
                LOCK.acquire()
        return super().loss(features, classes)
