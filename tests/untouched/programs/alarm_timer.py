"""A timer that the step sets, and whose signal it waits for."""

import signal
import threading

from parts import Small

RANG = []


class Model(Small):
    def loss(self, features, classes):
        has_rung = threading.Event()

        def ring(*_):
            RANG.append("a ring")
            has_rung.set()

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        # A signal that comes between Python's last look for one and the system's wait wakes nobody.
        while not has_rung.wait(0.05):
            pass
        signal.signal(signal.SIGALRM, before)
        return super().loss(features, classes)
