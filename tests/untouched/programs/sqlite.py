"""A row in a database for each step."""

import sqlite3
from contextlib import contextmanager

from parts import Small

BASE = {}


@contextmanager
def around():
    BASE["connection"] = sqlite3.connect("steps.db", isolation_level=None)
    BASE["connection"].execute("create table steps (number integer primary key, samples integer)")
    yield
    BASE["connection"].close()


class Model(Small):
    def loss(self, features, classes):
        BASE["connection"].execute("insert into steps (samples) values (?)", [len(features)])
        return super().loss(features, classes)
