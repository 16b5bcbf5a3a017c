"""forbid_syscalls(): has the kernel refuse what compiled code could change outside the process.

Python's own calls are refused with a reason by the audit hook in `harmless`; a C++ library that
opens a file itself (`torch.save`, safetensors) passes by that. The filter is a program for
seccomp(2) in the instructions of Linux's classic BPF (linux/filter.h, linux/seccomp.h). Numbers of
system calls are those of the kernel's tables for x86_64 and arm64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterator

#: linux/prctl.h
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
#: linux/seccomp.h: what a filter returns.
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
#: linux/bpf_common.h: load a word, jump if equal, jump if any bit is set, return.
_LOAD, _IF_EQUAL, _IF_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
#: Where struct seccomp_data has the number of the call, the architecture and the arguments.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_THREAD = 0x00010000

#: Architecture -> its number in linux/audit.h, and its calls.
_MACHINES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "open": 2, "openat": 257, "openat2": 437, "creat": 85, "truncate": 76,
            "rename": 82, "renameat": 264, "renameat2": 316, "mkdir": 83, "mkdirat": 258,
            "rmdir": 84, "link": 86, "linkat": 265, "unlink": 87, "unlinkat": 263,
            "symlink": 88, "symlinkat": 266, "chmod": 90, "fchmodat": 268, "fchmodat2": 452,
            "chown": 92, "lchown": 94, "fchownat": 260, "mknod": 133, "mknodat": 259,
            "utime": 132, "utimes": 235, "utimensat": 280, "setxattr": 188, "lsetxattr": 189,
            "removexattr": 197, "connect": 42, "bind": 49, "sendto": 44, "sendmsg": 46,
            "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
            "pidfd_send_signal": 424, "fork": 57, "vfork": 58, "clone": 56, "clone3": 435,
            "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_writev": 311,
            "shmget": 29, "shmat": 30, "shmctl": 31, "semop": 65, "semctl": 66, "msgsnd": 69,
            "io_uring_setup": 425, "fchmod": 91, "fchown": 93, "sendmmsg": 307, "fsetxattr": 190,
            "lremovexattr": 198, "fremovexattr": 199, "semtimedop": 220, "msgctl": 71,
            "flock": 73, "setpriority": 141, "sched_setaffinity": 203, "prlimit64": 302,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "openat": 56, "openat2": 437, "truncate": 45, "renameat": 38, "renameat2": 276,
            "mkdirat": 34, "linkat": 37, "unlinkat": 35, "symlinkat": 36, "fchmodat": 53,
            "fchmodat2": 452, "fchownat": 54, "mknodat": 33, "utimensat": 88, "setxattr": 5,
            "lsetxattr": 6, "removexattr": 14, "connect": 203, "bind": 200, "sendto": 206,
            "sendmsg": 211, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
            "pidfd_send_signal": 424, "clone": 220, "clone3": 435, "execve": 221,
            "execveat": 281, "ptrace": 117, "process_vm_writev": 271, "shmget": 194,
            "shmat": 196, "shmctl": 195, "semop": 193, "semctl": 191, "msgsnd": 189,
            "io_uring_setup": 425, "fchmod": 52, "fchown": 55, "sendmmsg": 269, "fsetxattr": 7,
            "lremovexattr": 15, "fremovexattr": 16, "semtimedop": 192, "msgctl": 187,
            "flock": 32, "setpriority": 140, "sched_setaffinity": 122, "prlimit64": 261,
        },
    ),
}  # fmt: skip
#: Calls whose arguments a filter cannot read. Libraries do without them where they are unknown.
_UNKNOWN = ("openat2", "clone3", "io_uring_setup")


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def forbid_syscalls() -> bool:
    """Refuse them to this thread and those that it starts; return whether the kernel agrees."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    listed = list(_filter(*machine))
    instructions = (_Instruction * len(listed))(*(_Instruction(*each) for each in listed))
    program = _Program(len(listed), instructions)
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)) == 0)


def _filter(architecture: int, calls: dict[str, int]) -> Iterator[tuple[int, int, int, int]]:
    """The instructions: code, how many to skip if true and if false, value."""
    refused, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _IF_EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _ALLOW
    yield _LOAD, 0, 0, _NUMBER
    for name, number in calls.items():
        if name in ("open", "openat"):
            yield from _unless(number, 1 if name == "open" else 2, _IF_SET, _WRITING, refused)
        elif name == "clone":  # threads may start
            yield from _unless(number, 0, _IF_SET, _CLONE_THREAD, refused, is_allowed_if=True)
        elif name in ("prlimit64", "sched_setaffinity"):  # of this process, which libraries ask
            yield from _unless(number, 0, _IF_EQUAL, 0, refused, is_allowed_if=True)
        elif name == "tgkill":  # a process may end itself, as abort() does
            yield from _unless(number, 0, _IF_EQUAL, os.getpid(), refused, is_allowed_if=True)
        else:
            yield _IF_EQUAL, 0, 1, number
            yield _RETURN, 0, 0, unknown if name in _UNKNOWN else refused
    yield _RETURN, 0, 0, _ALLOW


def _unless(
    number: int, argument: int, test: int, value: int, refused: int, *, is_allowed_if: bool = False
) -> Iterator[tuple[int, int, int, int]]:
    """Refuse or allow a call by one of its arguments."""
    if_true, if_false = (_ALLOW, refused) if is_allowed_if else (refused, _ALLOW)
    yield _IF_EQUAL, 0, 4, number
    yield _LOAD, 0, 0, _ARGUMENTS + 8 * argument
    yield test, 0, 1, value
    yield _RETURN, 0, 0, if_true
    yield _RETURN, 0, 0, if_false
