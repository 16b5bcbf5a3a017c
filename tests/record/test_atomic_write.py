"""Files are whole or not there."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from memcallback.record.oom_response import atomic_write


def test_text_and_bytes_are_written_and_folders_made(tmp_path):
    atomic_write(tmp_path / "a" / "b" / "text.md", "größer")
    atomic_write(tmp_path / "a" / "data", b"\0\1")
    assert (tmp_path / "a" / "b" / "text.md").read_text(encoding="utf-8") == "größer"
    assert (tmp_path / "a" / "data").read_bytes() == b"\0\1"
    assert [one.name for one in (tmp_path / "a" / "b").iterdir()] == ["text.md"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    atomic_write(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


def test_a_process_that_is_killed_in_the_middle_leaves_no_half_file(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from memcallback.record import oom_response\n"
        "oom_response.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "oom_response.atomic_write(Path(sys.argv[1]), 'x' * 1_000_000)\n"
    )
    path = tmp_path / "report.json"
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -9
    assert not path.exists()
    atomic_write(path, "whole")
    assert path.read_text() == "whole"


def test_of_several_writers_the_file_is_one_of_theirs(tmp_path):
    path = tmp_path / "report.json"
    texts = [str(number) * 200_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: atomic_write(path, text), texts))
    assert path.read_text() in texts
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


def test_a_folder_that_cannot_be_written_is_an_error_and_not_a_loss(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    with pytest.raises(FileExistsError):
        atomic_write(blocked / "report.json", "text")
    assert blocked.read_text() == "a file"
