"""A handler of `logging` that writes to an open file."""

import logging
from contextlib import contextmanager

from parts import Small

logger = logging.getLogger("steps of the user")


@contextmanager
def around():
    handler = logging.FileHandler("steps.log")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield
    handler.close()
    logger.removeHandler(handler)


class Model(Small):
    def loss(self, features, classes):
        logger.info("a step of %d samples", len(features))
        return super().loss(features, classes)
