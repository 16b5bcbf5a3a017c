"""Messages over a connection to a server that counts them."""

import socket
import threading
from contextlib import contextmanager

from parts import Small

RECEIVED = []
HELD = {}


def count(server):
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as lines:
        RECEIVED.extend(line.strip() for line in lines)


@contextmanager
def around():
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=count, args=[server])
        thread.start()
        with socket.create_connection(server.getsockname()) as HELD["connection"]:
            yield
        thread.join()
    HELD.clear()


class Model(Small):
    def loss(self, features, classes):
        HELD["connection"].sendall(b"a step\n")
        return super().loss(features, classes)
