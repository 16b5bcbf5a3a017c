"""The step starts threads and waits for one that has run all along."""

import queue
import threading
from contextlib import contextmanager

from parts import Small

ASKED, ANSWERS = queue.Queue(), queue.Queue()
NUMBERS = []


def answer():
    number = 0
    while ASKED.get():
        number += 1
        ANSWERS.put(number)


@contextmanager
def around():
    thread = threading.Thread(target=answer)
    thread.start()
    yield
    ASKED.put(False)
    thread.join()


class Model(Small):
    def loss(self, features, classes):
        ASKED.put(True)
        NUMBERS.append(ANSWERS.get())
        thread = threading.Thread(target=NUMBERS.append, args=["from a thread"])
        thread.start()
        thread.join()
        return super().loss(features * (1 + NUMBERS[-2] / 100), classes)
