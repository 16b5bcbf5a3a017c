"""detach() and become_harmless(): take from a forked process what could reach outside it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from memcallback.core.code_lines import own_line_here
from memcallback.core.control_groups import group_memory
from memcallback.core.errors import PredictionError
from memcallback.core.units import GiB, MiB
from memcallback.isolation.syscalls import forbid_syscalls

_libc = ctypes.CDLL(None, use_errno=True)
#: linux/prctl.h
_PR_SET_PDEATHSIG = 1
#: How often a child of another thread looks whether its parent is there.
_WATCH_S = 0.5
#: More time than the parent gives, which kills with a reason.
_GRACE_S = 30
#: Shared memory up to this size is copied, a larger piece can only be read.
_MAX_COPIED_BYTES = 64 * MiB
_LEAST_MEMORY_BYTES = GiB
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Audit events (https://docs.python.org/3/library/audit_events.html) -> what they do.
_FORBIDDEN = {
    "os.remove": "removes",
    "os.rmdir": "removes",
    "os.rename": "renames",
    "os.mkdir": "creates",
    "os.link": "creates a link to",
    "os.symlink": "creates a link to",
    "os.truncate": "truncates",
    "os.chmod": "changes",
    "os.chown": "changes",
    "os.utime": "changes",
    "os.setxattr": "changes",
    "os.removexattr": "changes",
    "fcntl.flock": "locks descriptor",
    "fcntl.lockf": "locks descriptor",
    "resource.prlimit": "limits process",
    "shutil.rmtree": "removes",
    "shutil.move": "moves",
    "socket.connect": "connects to",
    "socket.bind": "listens at",
    "socket.sendto": "sends to",
    "socket.sendmsg": "sends to",
    "subprocess.Popen": "starts the process",
    "os.system": "starts the process",
    "os.posix_spawn": "starts the process",
    "os.exec": "starts the process",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.kill": "sends a signal to process",
    "os.killpg": "sends a signal to process group",
    "signal.pthread_kill": "sends a signal to thread",
}


class OutsideError(PermissionError):
    """The user's step wanted to change something outside of the process that predicts it."""


def detach(
    *, keep: Collection[int], parent: int, is_of_main_thread: bool, timeout_s: float
) -> None:
    """Give up what this forked process shares with its parent, but for some descriptors.

    The parent waits for it, so that the copies of shared memory are of this moment.
    """
    _reset_signals(timeout_s)
    _end_with(parent, is_of_main_thread=is_of_main_thread)
    _close_descriptors(keep)
    _unshare_memory()


def become_harmless(*, is_background: bool) -> None:
    """Refuse from now on whatever reaches outside this process.

    In the background, besides a training, take the lowest priority.
    """
    _limit_memory()
    if is_background:
        os.nice(19)
    # An import would write the bytecode.
    sys.dont_write_bytecode = True
    # The first who asks for the folder of temporary files would try it by writing there.
    tempfile.tempdir = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
    sys.addaudithook(_forbid)
    if not forbid_syscalls():
        raise PredictionError(
            "A prediction needs seccomp, which keeps compiled code from changing files, and this "
            f"system ({platform.machine()}, Linux {platform.release()}) does not have it. "
            "isolate=False, or MEMCALLBACK_ISOLATE=0 in the environment, runs the prediction in "
            "this process"
        )


def _reset_signals(timeout_s: float) -> None:
    """Let signals end the process, rather than run the handlers of the training."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)


def _end_with(parent: int, *, is_of_main_thread: bool) -> None:
    """End this process when its parent does."""
    if is_of_main_thread:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    else:
        # For the kernel the thread that forked is the parent, and it may end long before.
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


def _limit_memory() -> None:
    """Take at most a part of the free memory, and be the first to be killed for it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = _sizes("/proc/self/status")
    available = _sizes("/proc/meminfo").get("MemAvailable")
    used = status.get("VmData")
    if used is None or available is None:
        return
    if (group := group_memory()) is not None:
        available = min(available, group.left_bytes)
    limit = used + max(_LEAST_MEMORY_BYTES, available // 2)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _sizes(path: str) -> dict[str, int]:
    """The sizes of a file of /proc, in bytes."""
    try:
        lines = re.findall(r"^(\w+):\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in lines}


def _close_descriptors(keep: Collection[int]) -> None:
    """Point every descriptor but some to /dev/null.

    They stay open: a number that is free would be given to the next file.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in keep and descriptor != null:
            with suppress(OSError):  # the one that listed the folder
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
    for stream in {0, 1, 2} - {null}:  # the program may have closed some
        os.dup2(null, stream, inheritable=False)
    sys.stdin = os.fdopen(0, closefd=False)
    # A notebook's streams send what they get through a thread that is not here.
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)


def _unshare_memory() -> None:
    """Replace memory that is shared with other processes by copies; large pieces are read only.

    So a semaphore, a counter or a memory-mapped file that the step changes stays as it is for the
    others. The memory of devices is left: nothing here can use it.
    """
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        span, permissions, offset, _, inode, *path = line.split(maxsplit=5)
        if permissions[1] != "w" or permissions[3] != "s":
            continue
        name = path[0] if path else ""
        if name.startswith("/dev/") and not name.startswith(("/dev/shm/", "/dev/zero")):
            continue
        start, end = (int(number, 16) for number in span.split("-"))
        if not _replace_by_copy(start, end - start, name, int(offset, 16), int(inode)):
            _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.PROT_READ)


def _replace_by_copy(start: int, size: int, name: str, offset: int, inode: int) -> bool:
    """Map a private copy in the place of shared memory; return whether that went."""
    try:
        file = os.open(name, os.O_RDONLY)
    except (OSError, ValueError):
        return _replace_by_content(start, size)
    try:
        if os.fstat(file).st_ino != inode:
            return _replace_by_content(start, size)
        return _map_private(start, size, 0, file, offset)
    finally:
        os.close(file)


def _replace_by_content(start: int, size: int) -> bool:
    if size > _MAX_COPIED_BYTES:
        return False
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        content = os.pread(memory, size, start)
    except OSError:  # pages behind the end of a file
        return False
    finally:
        os.close(memory)
    if len(content) < size or not _map_private(start, size, mmap.MAP_ANONYMOUS, -1, 0):
        return False
    ctypes.memmove(start, content, size)
    return True


def _map_private(start: int, size: int, flags: int, file: int, offset: int) -> bool:
    #: linux/mman.h
    fixed = 0x10
    _libc.mmap.restype = ctypes.c_void_p
    address = _libc.mmap(
        ctypes.c_void_p(start),
        ctypes.c_size_t(size),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | fixed | flags,
        file,
        ctypes.c_long(offset),
    )
    return bool(address == start)


def _forbid(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what would change something outside, naming the line that wants it."""
    if event == "open":
        path, _, flags = arguments
        if not isinstance(flags, int) or not flags & _WRITING or path == os.devnull:
            return
        deed, thing = "opens", f"{path!r} for writing"
    elif event == "sqlite3.connect":
        deed, thing = "opens", f"the database {arguments[0]!r}"
    elif event in _FORBIDDEN:
        deed, thing = _FORBIDDEN[event], ", ".join(map(repr, arguments[:2]))
        if event.startswith("socket."):
            thing = repr(arguments[1])
    else:
        return
    line = own_line_here()
    raise OutsideError(
        f"{line or 'The step'} {deed} {thing}. A prediction must not change anything outside of "
        "its process, so this was refused"
    )
