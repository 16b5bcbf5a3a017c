"""How a computation's process begins, in programs and on systems that make it hard."""

import errno
import os
import subprocess
import sys

import pytest

from memcallback.isolation.isolated import run_isolated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and Linux's limits")


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
