"""How a computation's process begins, in programs and on systems that make it hard."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from memcallback.core.errors import PredictionError
from memcallback.isolation import isolated
from memcallback.isolation.isolated import Isolated, run_isolated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and Linux's limits")


def children():
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return file.read().split()


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_program_without_standard_streams_gets_a_result_though_the_computation_prints(closed):
    program = (
        "import os, sys\n"
        "from memcallback.isolation.isolated import run_isolated\n"
        "def work(report):\n"
        "    print('words')\n"
        "    os.write(1, b'more words')\n"
        "    return 42\n"
        "os._exit(run_isolated(work))\n"
    )
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", program]
    assert subprocess.run(command, check=False).returncode == 42


@pytest.mark.parametrize("error", [None, OSError(errno.EPERM, "refused")])
def test_where_no_file_can_be_made_in_memory_a_temporary_one_has_the_result(monkeypatch, error):
    def refuse(name):
        raise error

    if error is None:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refuse)
    assert run_isolated(lambda report: 42) == 42


@pytest.fixture
def never():
    """What a forked child waits for, for ever."""
    reading, writing = os.pipe()
    # A handler stays until the program ends.
    waits = [reading]
    os.register_at_fork(after_in_child=lambda: [os.read(one, 1) for one in waits])
    yield
    waits.clear()
    os.close(reading)
    os.close(writing)


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("is_background", [False, True])
def test_a_process_that_hangs_as_it_begins_is_ended_and_says_why(monkeypatch, is_background):
    monkeypatch.setattr(isolated, "_BEGIN_S", 0.1)
    before = children()
    running = Isolated(lambda report: 42, is_background=is_background)
    assert running.wait(0)
    with pytest.raises(
        PredictionError,
        match=r"did not begin within 0\.1 s\. It may wait for a lock .*isolate=False",
    ):
        running.result()
    assert children() == before
