"""Asks cuDNN in a process of its own, where a question asked here would open a CUDA context.

A question makes cuDNN open a context of some 500 MiB on a device that it finds (`finds_device` in
cudnn.py). The program could then no longer fork processes that use CUDA. The other process finds no
device.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any, BinaryIO

from memcallback.cuda.convolution.cudnn import CuDNNError

_SERVE = """
import sys
sys.path[:] = {path!r}
from memcallback.cuda.convolution.elsewhere import serve
from memcallback.cuda.convolution.workspace import answer
serve(answer, sys.stdin.buffer, open({answers}, "wb"))
"""


def serve(answer: Callable[..., Any], questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions, one after another, until their sender closes them."""
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(answer(*question), answers)
        answers.flush()


class Elsewhere:
    """A process that answers questions about convolutions, until it is closed."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Not its standard output, to which code of the installation may write when Python starts.
        read, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE.format(path=sys.path, answers=write)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                pass_fds=(write,),
            )
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._answers = open(read, "rb")  # noqa: SIM115

    def ask(self, question: Sequence[Any]) -> Any:
        """Return its answer, or raise CuDNNError if the process has ended."""
        questions = self._process.stdin
        assert questions is not None
        try:
            with self._lock:
                pickle.dump(tuple(question), questions)
                questions.flush()
                return pickle.load(self._answers)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CuDNNError("the process that asks cuDNN has ended") from error

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with suppress(OSError):  # of a question that it did not read
            self._process.__exit__(None, None, None)
        self._answers.close()


def elsewhere() -> Elsewhere:
    """The process that this one asks; it ends with it."""
    return _elsewhere_of(os.getpid())


@lru_cache(maxsize=1)
def _elsewhere_of(pid: int) -> Elsewhere:
    """Made anew after a fork: two processes cannot read from one pipe."""
    made = Elsewhere()
    atexit.register(lambda: made.close() if os.getpid() == pid else None)
    return made
