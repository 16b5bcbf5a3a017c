"""A computation in a child process: its result, its errors, its end, and what it cannot do."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.distributed import c10d_logger

from memcallback.core.control_groups import GroupMemory
from memcallback.core.errors import MemoryWarning, PredictionError
from memcallback.core.units import MiB
from memcallback.isolation.isolated import Isolated, can_isolate, run_isolated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and Linux's limits")


def open_descriptors():
    """Pipes and our own files in memory."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists the folder
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in names if name.startswith(("pipe:", "/memfd:memcallback")))


def children():
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return file.read().split()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = open_descriptors(), children()
    yield
    assert (open_descriptors(), children()) == before


def outcome(deed):
    """What a deed in a child comes to: its value or its error as text."""

    def work(report):
        try:
            return repr(deed())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return run_isolated(work)


def test_a_result_comes_back_and_what_the_work_changed_does_not():
    seen = []
    assert run_isolated(lambda report: seen.append(1) or {"a": (1, 2)}) == {"a": (1, 2)}
    assert seen == []


def test_a_child_asks_for_no_lock_of_pytorchs_counters():
    counter = torch.monitor._WaitCounter

    def guards():
        with torch.monitor._WaitCounter("a").guard(), c10d_logger._WaitCounter("b").guard():
            return torch.monitor._WaitCounter.__module__

    # A thread in a store of torch.distributed may have had it when the child was forked.
    assert outcome(guards) == repr("memcallback.core.torch_private")
    assert c10d_logger._WaitCounter is torch.monitor._WaitCounter is counter


def test_a_result_larger_than_any_pipe_comes_back():
    assert run_isolated(lambda report: bytes(8 * MiB)) == bytes(8 * MiB)


def test_reports_come_in_order():
    got = []
    run_isolated(
        lambda report: [report((number, "x" * 100_000)) for number in range(5)] and None,
        on_report=got.append,
    )
    assert got == [(number, "x" * 100_000) for number in range(5)]


class OfTheUser(Exception):
    """Cannot be unpickled: it takes two arguments, and gives its base one."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_comes_back_with_its_causes():
    def work(report):
        try:
            raise OfTheUser(1, 2)
        except OfTheUser as error:
            raise PredictionError("no step") from error

    with pytest.raises(PredictionError, match="no step") as caught:
        run_isolated(work)
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert str(cause) == "OfTheUser: 1 and 2"
    assert "raise OfTheUser(1, 2)" in str(cause.__cause__)


def test_what_cannot_be_pickled_is_an_error():
    with pytest.raises(Exception, match="pickle"):
        run_isolated(lambda report: threading.Lock())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_wants_to_end_the_process_is_an_error(error):
    def work(report):
        raise error

    with pytest.raises(PredictionError, match=f"to end the process: {type(error).__name__}"):
        run_isolated(work)


def test_a_warning_comes_back():
    with pytest.warns(MemoryWarning, match="full"):
        run_isolated(lambda report: warnings.warn("full", MemoryWarning, stacklevel=1))


def spin():
    while True:
        pass


def sleep():
    time.sleep(10**6)


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize("deed", [spin, sleep, wait_for_a_lock])
def test_what_hangs_is_killed_and_the_line_named(deed):
    with pytest.raises(PredictionError, match=rf"test_isolated\.py:\d+ in {deed.__name__}\b"):
        run_isolated(lambda report: deed(), timeout_s=0.5)


def test_a_child_that_is_killed_is_an_error():
    with Isolated(lambda report: report(os.getpid()) or sleep()) as running:
        numbers = []
        while not numbers:
            running.wait(0.1, numbers.append)
        os.kill(numbers[0], signal.SIGKILL)
        assert running.wait(60)
        with pytest.raises(PredictionError, match="was ended by SIGKILL"):
            running.result()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_child_at_once(number):
    with Isolated(lambda report: report(os.getpid()) or sleep()) as running:
        numbers = []
        while not numbers:
            running.wait(0.1, numbers.append)
        os.kill(numbers[0], number)
        assert running.wait(60)


def test_a_child_that_ends_without_a_word_is_an_error():
    with pytest.raises(PredictionError, match="ended before it had a result"):
        run_isolated(lambda report: os._exit(0))


def test_a_crash_is_an_error():
    with pytest.raises(PredictionError, match="was ended by SIGSEGV"):
        run_isolated(lambda report: ctypes.string_at(0))


def test_memory_is_limited(monkeypatch):
    nothing_left = GroupMemory(limit_bytes=MiB, used_bytes=2 * MiB)
    monkeypatch.setattr("memcallback.isolation.harmless.group_memory", lambda: nothing_left)
    held = []
    text = outcome(lambda: [held.append(np.ones(MiB)) for _ in range(10_000)])
    assert text.startswith(("MemoryError", "_ArrayMemoryError", "numpy"))


def test_one_that_is_closed_is_killed():
    running = Isolated(lambda report: sleep())
    running.close()
    assert running.wait(0)


def test_a_copy_in_another_process_does_not_end_it():
    """A loader's workers are forked while a prediction runs."""
    with Isolated(lambda report: report(1) or sleep()) as running:
        got = []
        while not got:
            running.wait(0.1, got.append)
        number = os.fork()
        if number == 0:
            running.close()
            os._exit(0)
        os.waitpid(number, 0)
        assert not running.wait(0)


PARENT = """
import os, sys, time
from memcallback.isolation.isolated import run_isolated
def work(report):
    report(os.getpid())
    time.sleep(10**6)
run_isolated(work, on_report=lambda number: print(number, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_child_ends_with_its_parent(number):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(number)
        parent.wait(60)
    ended, _, _ = select.select([child], [], [], 60)
    os.close(child)
    assert ended, "the child outlives its parent"


def test_it_does_not_run_in_itself():
    assert can_isolate()
    assert run_isolated(lambda report: can_isolate()) is False


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_is_above_zero(timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be above 0 and at most"):
        run_isolated(lambda report: None, timeout_s=timeout_s)


# What it cannot do.


def test_files_stay_as_they_are(tmp_path):
    path = tmp_path / "best.pt"
    torch.save({"a": torch.ones(3)}, path)
    before = path.read_bytes()
    database = tmp_path / "log.sqlite"
    deeds = {
        "opens": lambda: path.open("w"),
        "opens ": lambda: path.open("a"),
        "removes": lambda: os.remove(path),
        "renames": lambda: os.rename(path, tmp_path / "other"),
        "creates": lambda: os.mkdir(tmp_path / "folder"),
        "truncates": lambda: os.truncate(path, 0),
        "opens the database": lambda: sqlite3.connect(database),
    }
    for deed, action in deeds.items():
        text = outcome(action)
        assert f"test_isolated.py:{action.__code__.co_firstlineno} in <lambda> {deed}" in text
    # These do not ask Python.
    said = outcome(lambda: torch.save({}, str(path)))
    assert "Operation not permitted" in said or "cannot be opened" in said  # PyTorch 2.6
    assert outcome(lambda: ctypes.CDLL(None).unlink(bytes(path))) == "-1"
    assert outcome(lambda: ctypes.CDLL(None).truncate(bytes(path), 0)) == "-1"
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["best.pt"]


def test_an_open_file_is_not_written_and_not_read(tmp_path):
    with open(tmp_path / "log", "w+") as file:
        file.write("one\n")
        file.flush()
        assert outcome(lambda: file.write("two\n") and file.flush()) == "None"
        assert outcome(lambda: os.pread(file.fileno(), 4, 0)) in ("b''", "b'\\x00'")
        file.write("three\n")
    assert (tmp_path / "log").read_text() == "one\nthree\n"


def test_no_process_is_started_and_none_gets_a_signal():
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert "starts the process" in outcome(lambda: subprocess.run(["true"], check=True))
        assert "starts a process" in outcome(os.fork)
        assert "sends a signal" in outcome(lambda: os.kill(other.pid, signal.SIGTERM))
        assert outcome(lambda: ctypes.CDLL(None).kill(other.pid, 15)) == "-1"
        assert other.poll() is None
        other.kill()


def test_nothing_is_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as mine, server.accept()[0] as theirs:
            assert "connects to" in outcome(lambda: socket.create_connection(address))
            outcome(lambda: mine.send(b"from the child"))
            mine.send(b"mine")
            assert theirs.recv(100) == b"mine"


def test_shared_memory_is_a_copy(tmp_path):
    # Python 3.14's default method would start a process that keeps track of semaphores.
    context = multiprocessing.get_context("fork")
    counter, semaphore = context.Value("i", 1), context.Semaphore(1)
    mapped = np.memmap(tmp_path / "data", dtype="f4", mode="w+", shape=(1000,))
    tensor = torch.ones(10).share_memory_()

    def change():
        counter.value += 1
        semaphore.acquire()
        mapped[:] = 2
        tensor.add_(1)
        return counter.value, mapped[0].item(), tensor[0].item()

    assert outcome(change) == "(2, 2.0, 2.0)"
    assert (counter.value, mapped[0], tensor[0]) == (1, 0, 1)
    assert semaphore.acquire(block=False)


def test_a_large_piece_of_shared_memory_can_only_be_read():
    tensor = torch.ones(64 * MiB // 4 + 1).share_memory_()
    assert outcome(lambda: tensor[0].item()) == "1.0"
    with pytest.raises(PredictionError, match="SIGSEGV"):
        outcome(lambda: tensor.add_(1))
    assert tensor[0] == 1


class Closes:
    def __init__(self, descriptor, folder):
        self.descriptor, self.folder = descriptor, folder

    def __del__(self):
        os.close(self.descriptor)
        os.rmdir(self.folder)


def test_a_destructor_reaches_nothing(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with open(tmp_path / "file", "w") as file:
        assert outcome(lambda: Closes(file.fileno(), folder) and None) == "None"
        file.write("still open")
    assert folder.is_dir()


def test_threads_can_be_started():
    def deed():
        got = []
        thread = threading.Thread(target=lambda: got.append(1))
        thread.start()
        thread.join()
        return got

    assert outcome(deed) == "[1]"


def test_the_standard_streams_are_not_written(capfd):
    print("before")
    outcome(lambda: print("from the child", flush=True))
    outcome(lambda: os.write(1, b"from the child"))
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_a_computation_outlives_the_thread_that_began_it():
    """`nn.DataParallel` runs a forward pass in threads of its own."""
    begun = []
    thread = threading.Thread(
        target=lambda: begun.append(Isolated(lambda report: report(1) or sum(range(10**6))))
    )
    thread.start()
    thread.join()
    with begun[0] as running:
        assert running.wait(60)
        assert running.result() == sum(range(10**6))


def test_a_child_has_a_folder_for_temporary_files_without_a_try(monkeypatch):
    folder = tempfile.gettempdir()
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert outcome(tempfile.gettempdir) == repr(folder)
    assert tempfile.tempdir is None
