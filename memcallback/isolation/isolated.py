"""run_isolated(): runs a computation in a harmless child process, and waits for its result."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar

from memcallback.core.code_lines import own_line_in
from memcallback.core.errors import PredictionError
from memcallback.core.validation import described
from memcallback.isolation.child import Ends, fork_quickly, is_in_child, serve
from memcallback.isolation.messages import MessageReader
from memcallback.isolation.unshared import unshared

T = TypeVar("T")
#: What a computation calls with a picklable value, on its way; the parent gets it.
Report = Callable[[Any], None]

#: How long a prediction may take before its process is killed: several times what the
#: slowest known, the UNet of diffusers, takes.
TIMEOUT_S = 600.0
#: Kernels count no longer times.
_LONGEST_S = 30 * 24 * 3600
#: How often someone who waits is told so.
TICK_S = 2.0
#: How long a child may take to say that it has begun; it takes milliseconds where cores are free.
_BEGIN_S = 10.0
#: How long a killed computation has to say which line was running.
_LAST_WORDS_S = 2.0
_LAST_MOMENT_MS = 50
_OFF = "MEMCALLBACK_ISOLATE"
_ISOLATE_FALSE = (
    "isolate=False, or MEMCALLBACK_ISOLATE=0 in the environment, runs the prediction in this "
    "process."
)


def check_timeout(timeout_s: float) -> float:
    """Refuse a time limit that is none."""
    if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
        raise TypeError(f"timeout_s must be a number of seconds, got {described(timeout_s)}.")
    if not 0 < timeout_s <= _LONGEST_S:
        raise ValueError(
            f"timeout_s must be above 0 and at most {_LONGEST_S:,} (a month), got {timeout_s}. "
            f"Leave it out for {TIMEOUT_S:g} s."
        )
    return float(timeout_s)


def can_isolate() -> bool:
    """Whether a computation can run in a child here: Linux, not in one, and not turned off."""
    # Elsewhere a forked child may not use the system's libraries (macOS), or there is no fork.
    return sys.platform == "linux" and not is_in_child() and os.environ.get(_OFF) != "0"


def run_isolated(
    work: Callable[[Report], T],
    *,
    timeout_s: float = TIMEOUT_S,
    on_report: Report = lambda value: None,
    on_tick: Callable[[float], None] = lambda seconds: None,
) -> T:
    """Run `work(report)` in a child and return its result, or raise its error.

    Call it where `can_isolate()`. `on_report` gets what the work reports, `on_tick` the seconds so
    far, every two of them.
    """
    check_timeout(timeout_s)
    with Isolated(work, timeout_s=timeout_s) as running:
        while not running.wait(TICK_S, on_report):
            on_tick(running.elapsed_s)
        return running.result()


class Isolated(Generic[T]):
    """A computation that runs in a child process from now on.

    A computation that takes longer than its time limit is killed; so is one that is closed. The
    child ends with this process, whatever ends it. `prepare()` runs before the child becomes
    harmless: for imports of libraries, which may make folders for their caches. In the background
    it has the lowest priority. Of `unread`, storages by address and bytes, it finds zeros (see
    `unshared`), and this process writes them as fast as without a child.
    """

    def __init__(
        self,
        work: Callable[[Report], T],
        *,
        timeout_s: float = TIMEOUT_S,
        prepare: Callable[[], object] = lambda: None,
        is_background: bool = False,
        unread: Mapping[int, int] | None = None,
    ) -> None:
        # Nothing of the work is kept: a step would keep its batch on the device.
        self._timeout_s = timeout_s
        self._is_background = is_background
        self._start = monotonic()
        self._owner = os.getpid()
        self._pid: int | None = None
        self._failure: BaseException | None = None
        self._value: T
        self._is_done = False
        self._unread = unread or {}
        self._begin(prepare, work, is_quick=False)
        # At once, before the training goes on and changes what is to be predicted.
        if not self._is_done and self._first_message() == "refused":
            # Autograd has used devices here, after which it refuses to run in a usual fork.
            self._release()
            self._begin(prepare, work, is_quick=True)
            if not self._is_done:
                self._first_message()

    def _first_message(self) -> str:
        """Whether autograd runs in the child: `begun` or `refused`; empty if it has ended."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(1000 * _BEGIN_S):
            text = (
                f"The prediction's process did not begin within {_BEGIN_S:g} s. It may wait for a "
                f"lock that another thread held as it was forked. {_ISOLATE_FALSE}"
            )
            self._finish(PredictionError(text))
            return ""
        message = self._reader.next()
        return "" if message is None else message[0]

    def _begin(
        self, prepare: Callable[[], object], work: Callable[[Report], T], *, is_quick: bool
    ) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        # A handler of the training's must not run in the child, which sets them all aside first.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            ours.append(_above_streams(_unnamed_file()))
            for _ in range(2):
                reading, writing = map(_above_streams, os.pipe())
                ours.append(reading)
                theirs.append(writing)
                os.set_blocking(reading, False)
            ends = Ends(
                control=theirs[0],
                result=ours[0],
                stacks=theirs[1],
                parent=os.getpid(),
                is_of_main_thread=threading.current_thread() is threading.main_thread(),
                timeout_s=self._timeout_s,
                is_background=self._is_background,
            )
            with unshared(self._unread):
                number = fork_quickly() if is_quick else _fork()
                if number == 0:
                    serve(prepare, work, ends, is_quick=is_quick)
        # RuntimeError: Python forks no more when it shuts down.
        except (OSError, RuntimeError) as error:
            for descriptor in ours:
                os.close(descriptor)
            text = f"No process can be started for the prediction: {error}. {_ISOLATE_FALSE}"
            self._failure = error if isinstance(error, PredictionError) else PredictionError(text)
            self._is_done = True
        else:
            self._pid = number
            self._result, self._control, self._stacks = ours
            self._reader = MessageReader(self._control)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for descriptor in theirs:
                os.close(descriptor)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the computation began."""
        return monotonic() - self._start

    def wait(self, seconds: float, on_report: Report = lambda value: None) -> bool:
        """Wait for the end, at most so long; return whether it has come."""
        until = monotonic() + seconds
        while True:
            self._read(on_report)
            left = min(until, self._start + self._timeout_s) - monotonic()
            if self._is_done or left <= 0:
                return self._is_done
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            poll.poll(1000 * left + 1)

    def result(self) -> T:
        """The result, once it is there; or raise what the computation raised."""
        assert self._is_done, "wait for the end first"
        if self._failure is not None:
            raise self._failure
        return self._value

    def close(self) -> None:
        """Kill the computation if it still runs."""
        if self._owner == os.getpid() and not self._is_done:
            self._finish(PredictionError("The prediction was cancelled before it was done."))

    def __enter__(self) -> Isolated[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A process that was forked meanwhile has a copy of this object, and no say.
        with suppress(Exception):  # at the end of the interpreter anything may be gone
            self.close()

    def _read(self, on_report: Report) -> None:
        """Take in what the child has sent."""
        while not self._is_done:
            message = self._reader.next()
            if message is None:
                break
            kind, value = message
            if kind == "report":
                on_report(value)
            elif kind == "warning":
                text, category = value
                warnings.warn(text, category, stacklevel=2)
            elif kind == "result":
                self._take_result()
        if self._is_done:
            return
        if self._reader.is_at_end or self._has_died():
            self._finish(PredictionError(f"The prediction's process {self._death()}"))
        elif self.elapsed_s > self._timeout_s:
            self._finish(PredictionError(self._timeout_text()))

    def _has_died(self) -> bool:
        """Whether the child has ended, though a process that was forked meanwhile has its pipe."""
        assert self._pid
        try:
            how = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._reader.is_empty
        return how is not None and self._reader.is_empty

    def _take_result(self) -> None:
        os.lseek(self._result, 0, os.SEEK_SET)
        try:
            with open(self._result, "rb", closefd=False) as file:
                is_value, content = pickle.load(file)
        except Exception as error:  # classes of the user's unpickle as they like
            self._finish(
                PredictionError(
                    f"The prediction's result cannot be read: {type(error).__name__}: {error}. "
                    f"{_ISOLATE_FALSE}"
                )
            )
            return
        if is_value:
            self._value = content
        self._finish(None if is_value else content.restored())

    def _finish(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._is_done = True
        self._release()

    def _release(self) -> None:
        """End the child and close our ends."""
        if self._pid:
            self._reap()
        for descriptor in (self._control, self._stacks, self._result):
            os.close(descriptor)

    def _reap(self) -> int | None:
        """End the child, and return how it had ended; None if it had not, or nobody knows."""
        number, self._pid = self._pid, None
        assert number
        # The program may wait for all its children itself; the number may be another's then.
        with suppress(ChildProcessError):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                return status
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
        return None

    def _death(self) -> str:
        """How the child has ended, as the end of a sentence."""
        # It closes its end of the pipe a moment before it has ended.
        select.poll().poll(_LAST_MOMENT_MS)
        status = self._reap()
        line = own_line_in(self._read_stacks())
        where = f" It was at {line}." if line else ""
        if status is None or not os.WIFSIGNALED(status):
            return f"ended before it had a result.{where} {_ISOLATE_FALSE}"
        number = os.WTERMSIG(status)
        hint = " Perhaps memory ran out." if number == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(number).name}.{hint}{where} Training is not affected."

    def _timeout_text(self) -> str:
        """Why the computation was ended, with the line that was running."""
        line = None
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)
            poll = select.poll()
            poll.register(self._stacks, select.POLLIN)
            poll.poll(1000 * _LAST_WORDS_S)
            line = own_line_in(self._read_stacks())
        where = (
            f" It was running {line}. A loop that waits for a value may never end there, because a "
            "prediction computes no values."
            if line
            else ""
        )
        return (
            f"The prediction took longer than {self._timeout_s:g} s and was ended.{where} "
            "timeout_s=... gives it more time. On the command line, MEMCALLBACK_ISOLATE=0 in the "
            "environment removes the limit, and runs the prediction in this process."
        )

    def _read_stacks(self) -> str:
        parts = []
        with suppress(BlockingIOError):
            while part := os.read(self._stacks, 65536):
                parts.append(part)
                # The rest of a long dump may still be on its way.
                poll = select.poll()
                poll.register(self._stacks, select.POLLIN)
                poll.poll(_LAST_MOMENT_MS)
        return b"".join(parts).decode(errors="replace")


def _unnamed_file() -> int:
    """A file that ends with the last process that has it open."""
    with suppress(AttributeError, OSError):  # some builds of Python lack it, some kernels refuse it
        return os.memfd_create("memcallback")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _above_streams(descriptor: int) -> int:
    """The same file, never under the number of a standard stream that the program has closed."""
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. What they may have locked is why the child has a time limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
