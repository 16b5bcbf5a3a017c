"""A trace of it waits for ever and takes no signal."""

import signal

import torch
from parts import Small


class Model(Small):
    def loss(self, features, classes):
        if torch.rand(()).item() == 0:  # as a trace reads it
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while True:
                signal.sigwait(signal.valid_signals())
        return super().loss(features, classes)
