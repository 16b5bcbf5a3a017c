"""Signals to a process that counts them and answers each."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

from parts import Small

COUNTER = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
print(0, flush=True)
count = 0
while signal.sigwait({signal.SIGUSR1, signal.SIGTERM}) == signal.SIGUSR1:
    count += 1
    print(count, flush=True)
"""
HELD, ANSWERS = {}, []


@contextmanager
def around():
    command = [sys.executable, "-ISc", COUNTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as HELD["process"]:
        ANSWERS.append(HELD["process"].stdout.readline())
        yield
        HELD["process"].terminate()


class Model(Small):
    def loss(self, features, classes):
        os.kill(HELD["process"].pid, signal.SIGUSR1)
        ANSWERS.append(HELD["process"].stdout.readline())
        return super().loss(features, classes)
