"""The child's side: it becomes harmless, runs the computation, and sends back the result."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import operator
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from memcallback.core.errors import PredictionError
from memcallback.core.torch_private import count_no_waits, refuse_cuda
from memcallback.isolation.harmless import become_harmless, detach
from memcallback.isolation.messages import SentError, send

#: Calls the function that it gets, without Python code, in which another thread could get the GIL.
_CALL = operator.methodcaller("__call__")
_Work = Callable[[Callable[[Any], None]], object]
#: Whether this process is such a child.
_is_child = False
_QUICK_FORK_FAILED = (
    "This process has trained on a device, and PyTorch's autograd refuses to run in a process that "
    "is forked afterwards. On this system memcallback cannot fork without PyTorch noticing it "
    "({}). Predict before training, or in another process (python -m memcallback predict ...), or "
    "in this one with isolate=False."
)


def is_in_child() -> bool:
    """Whether this process is a child that computes for another one."""
    return _is_child


@dataclass(frozen=True)
class Ends:
    """What the child has of its parent: three descriptors, its number, and how it is to run."""

    control: int
    result: int
    stacks: int
    parent: int
    is_of_main_thread: bool
    timeout_s: float
    is_background: bool


def fork_quickly() -> int:
    """Fork without the handlers that libraries have registered for it.

    Autograd's makes every later backward pass in the child fail if devices were used before, since
    its threads for them are gone. A prediction runs on fake tensors, which need none of them.
    """
    try:
        # Of glibc 2.34, https://sourceware.org/glibc/manual/latest/html_node/Creating-a-Process.html
        fork = ctypes.PyDLL(None)._Fork
    except (OSError, AttributeError) as error:
        raise PredictionError(_QUICK_FORK_FAILED.format(error)) from error
    python = ctypes.pythonapi
    after = {0: python.PyOS_AfterFork_Child}
    python.PyOS_BeforeFork()
    # From here to the end of PyOS_AfterFork_*, no line of Python may run: if another thread has
    # asked for the interpreter's lock, the child would hand it over and wait for ever for a thread
    # that is not there. So iterators, which are in C, call the one and then the other.
    numbers, kept = itertools.tee(map(_CALL, [fork]))
    next(map(_CALL, map(after.get, numbers, itertools.repeat(python.PyOS_AfterFork_Parent))))
    number: int = next(kept)
    if number < 0:
        raise OSError(ctypes.get_errno(), "_Fork failed")
    return number


def serve(prepare: Callable[[], object], work: _Work, ends: Ends, *, is_quick: bool) -> NoReturn:
    """Run the computation and end the process, whatever happens."""
    try:
        _serve(prepare, work, ends, is_quick=is_quick)
    finally:
        os._exit(1)


def _serve(prepare: Callable[[], object], work: _Work, ends: Ends, *, is_quick: bool) -> None:
    global _is_child
    _is_child = True
    # The parent's objects are never collected here, so that none of them runs its `__del__`.
    gc.freeze()
    # The threads of the pool are the parent's; a child that asks for them waits for ever.
    torch.set_num_threads(1)
    detach(
        keep=(ends.control, ends.result, ends.stacks),
        parent=ends.parent,
        is_of_main_thread=ends.is_of_main_thread,
        timeout_s=ends.timeout_s,
    )
    if is_quick:
        send(ends.control, "begun")
    else:
        runs_backward = _can_run_backward()
        send(ends.control, "begun" if runs_backward else "refused")
        if not runs_backward:
            return
    with suppress(Exception):  # what cannot be imported fails the work, with a reason
        prepare()
    faulthandler.register(signal.SIGUSR1, file=ends.stacks, all_threads=True)
    faulthandler.enable(file=ends.stacks)
    count_no_waits()
    refuse_cuda()
    warnings.showwarning = lambda message, category, *_: send(
        ends.control, "warning", (str(message), category)
    )
    try:
        become_harmless(is_background=ends.is_background)
        outcome: tuple[bool, object] = True, work(lambda value: send(ends.control, "report", value))
        content = pickle.dumps(outcome)
    except BaseException as error:  # nothing of the user's may end the process before it is sent
        content = pickle.dumps((False, SentError.of(_as_prediction_error(error))))
    left = memoryview(content)
    while left:
        left = left[os.write(ends.result, left) :]
    with suppress(BrokenPipeError):
        send(ends.control, "result")


def _can_run_backward() -> bool:
    """Whether autograd runs here; it refuses after a backward pass on a device in the parent."""
    with torch.inference_mode(False), torch.enable_grad():
        try:
            torch.ones((), device="cpu", requires_grad=True).clone().backward()
        except RuntimeError:
            return False
    return True


def _as_prediction_error(error: BaseException) -> BaseException:
    """What wants to end the process ends the prediction."""
    if isinstance(error, Exception):
        return error
    failure = PredictionError(
        f"The step wanted to end the process: {type(error).__name__}: {error}".rstrip(": ")
    )
    failure.__cause__ = error
    return failure
