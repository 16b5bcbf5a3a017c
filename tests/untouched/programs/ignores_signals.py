"""A trace of it waits for ever and takes no signal."""

import signal

from parts import Small


class Model(Small):
    def loss(self, features, classes):
        if next(self.parameters()).sum().item() == 0:  # as a trace reads it
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while True:
                signal.sigwait(signal.valid_signals())
        return super().loss(features, classes)
