"""Files are whole or not there, on disks and at addresses of fsspec."""

import errno
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from memcallback.core.files import inside, make_folder, make_next_version, place_of, write_file


@pytest.fixture
def store():
    """What is at memory:// addresses; empty before and after."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_text_and_bytes_are_written(tmp_path):
    write_file(tmp_path / "text.md", "größer")
    write_file(str(tmp_path / "data"), b"\0\1")
    assert (tmp_path / "text.md").read_text(encoding="utf-8") == "größer"
    assert (tmp_path / "data").read_bytes() == b"\0\1"
    assert names(tmp_path) == ["data", "text.md"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_file(path, "old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["report.json"]


def test_a_file_that_the_system_does_not_let_grow_leaves_the_old_one(tmp_path):
    program = (
        "import resource, sys\n"
        "from memcallback.core.files import write_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_file(sys.argv[1], 'x' * 1_000_000)\n"
    )
    path = tmp_path / "step.pickle"
    write_file(path, "old")
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=False, capture_output=True, text=True
    )
    assert "File too large" in ended.stderr
    assert path.read_text() == "old"
    assert names(tmp_path) == ["step.pickle"]


def test_a_process_that_is_killed_in_the_middle_leaves_no_half_file(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from memcallback.core import files\n"
        "files.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_file(sys.argv[1], 'x' * 1_000_000)\n"
    )
    path = tmp_path / "report.json"
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -9
    assert not path.exists()
    write_file(path, "whole")
    assert path.read_text() == "whole"


def test_of_several_writers_the_file_is_one_of_theirs(tmp_path):
    path = tmp_path / "report.json"
    texts = [str(number) * 200_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_file(path, text), texts))
    assert path.read_text() in texts
    assert names(tmp_path) == ["report.json"]


def test_a_folder_that_cannot_be_made_is_an_error_and_not_a_loss(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    with pytest.raises(FileExistsError):
        make_folder(str(blocked))
    with pytest.raises(NotADirectoryError):
        write_file(blocked / "report.json", "text")
    assert blocked.read_text() == "a file"


def test_a_file_in_a_missing_folder_is_an_error_that_names_that_file(tmp_path):
    target = tmp_path / "missing" / "page.html"
    with pytest.raises(FileNotFoundError) as error:
        write_file(target, "text")
    assert error.value.filename == str(target)


def test_the_rights_of_an_earlier_file_stay(tmp_path):
    path = tmp_path / "step.pickle"
    path.write_text("old")
    path.chmod(0o640)
    write_file(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text() == "new"


def test_through_a_link_the_file_that_it_names_is_written(tmp_path):
    path, link = tmp_path / "elsewhere.pickle", tmp_path / "step.pickle"
    path.write_text("old")
    link.symlink_to(path)
    write_file(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "through it")
    reader.join()
    assert read == ["through it"]
    assert pipe.is_fifo()


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="pipes have no names in /dev/fd here")
def test_a_pipe_without_a_name_is_written_to():
    # As /dev/stdout is one in `memcallback report ... -o /dev/stdout | less`.
    reads, writes = os.pipe()
    write_file(f"/dev/fd/{writes}", "through it")
    os.close(writes)
    with os.fdopen(reads) as pipe:
        assert pipe.read() == "through it"


def test_an_address_is_written_by_fsspec(store):
    folder = make_next_version("memory://bucket/runs")
    write_file(inside(folder, "report.md"), "größer")
    assert folder == "memory://bucket/runs/version_0"
    assert store.cat("/bucket/runs/version_0/report.md").decode() == "größer"
    assert make_next_version("memory://bucket/runs/") == "memory://bucket/runs/version_1"


def test_a_write_that_fails_at_an_address_leaves_the_old_file(store, monkeypatch):
    write_file("memory://report.md", "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MemoryFile, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_file("memory://report.md", "new")
    assert store.cat("/report.md") == b"old"


def test_an_address_of_an_unknown_kind_is_an_error_of_the_system():
    with pytest.raises(OSError, match=r"'nosuch://bucket/report\.md' cannot be reached"):
        write_file("nosuch://bucket/report.md", "text")


@pytest.mark.parametrize("form", ["file://{}", "file:{}", "local://{}"])
def test_an_address_of_this_disk_is_a_path(form, tmp_path):
    assert place_of(form.format(tmp_path)) == str(tmp_path)
    write_file(form.format(tmp_path / "report.md"), "text")
    assert (tmp_path / "report.md").read_text() == "text"


def test_a_version_makes_the_folders_above_it(tmp_path):
    folder = tmp_path / "runs" / "memcallback"
    assert make_next_version(str(folder)) == str(folder / "version_0")
    assert (folder / "version_0").is_dir()


def test_a_transaction_of_ours_is_none_of_the_users_instance(store, monkeypatch):
    seen, start = [], fsspec.transaction.Transaction.start

    def watched(self):
        seen.append(self.fs)
        start(self)

    monkeypatch.setattr(fsspec.transaction.Transaction, "start", watched)
    write_file("memory://runs/report.md", "whole")
    assert store.cat("/runs/report.md") == b"whole"
    (ours,) = seen
    assert ours is not store
    assert fsspec.filesystem("memory") is store
