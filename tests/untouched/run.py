"""Runs programs, each in a process of its own, and says what each left.

    python tests/untouched/run.py FOLDER

It imports torch and Lightning once and forks for each program; itself it never trains. Each line
of its input is JSON with the arguments of `run` for a program, each line of its output what the
program left. Programs run in FOLDER.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import time
import warnings
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from digest import (
    children_of,
    command_of,
    digest,
    files_in,
    process_state,
    program_state,
    random_state,
)
from loops import LOOPS

sys.path.insert(0, str(Path(__file__).parent / "programs"))

#: What a loop imports late; with memcallback, more.
_LATE = {"": ["torch.utils.tensorboard"], "huggingface": ["transformers.trainer", "accelerate"]}
_LATE_WATCHED = [
    "matplotlib.pyplot",
    "memcallback.integrations.lightning.callback",
    "memcallback.report.pictures",
    "memcallback.report.training_page",
    "memcallback.trace.tracer",
]
_PR_SET_CHILD_SUBREAPER = 36
#: How long processes that a program has left may take to end by themselves.
_GRACE_S = 10


def run(home, program, loop, device, *, is_watched, limit_s, patience_s):
    """Run a program in a fork, with memcallback or without; what it left, as a dictionary.

    Its prediction may take `patience_s`, None for the default.
    """
    shutil.rmtree(home, ignore_errors=True)
    (home / "work").mkdir(parents=True)
    shared = _files_in_shared_memory().keys()
    # With PyTorch 2.6 an import here starts a process of Inductor's.
    own = set(children_of(os.getpid()))
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be(program, loop, device, home, is_watched=is_watched, patience_s=patience_s)
    has_ended, status, used = _wait(pid, limit_s)
    left = _left_behind(own)
    report = home / "report.json"
    said = json.loads(report.read_text()) if report.exists() else {"report": "none"}
    text = (home / "stdout").read_text(errors="replace")
    said |= {
        "it ended": has_ended,
        "exit status": status,
        "left behind": left,
        "shared memory left": _left_in_shared_memory(shared),
        "files": files_in(home / "work"),
        "printed": re.findall(r"user: ([^\r\n]*)", text),
        "peak_kib": used.ru_maxrss,
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "stderr": (home / "stderr").read_text(errors="replace")[-3000:],
    }
    shutil.rmtree(home)
    return said


def _be(name, loop, device, home, *, is_watched, patience_s):
    """Be the program: train, write what there is then, and end as it ends."""
    os.setsid()
    os.chdir(home / "work")
    for stream in (1, 2):
        path = home / ("stdout" if stream == 1 else "stderr")
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.closerange(3, 64)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    told = []
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, kind, *_: told.append(f"{kind.__name__}: {message}")
    out = {"ended with": None}
    program = import_module(name)
    try:
        around = program.around() if hasattr(program, "around") else nullcontext()
        with around:
            LOOPS[loop](program, device, is_watched, out, patience_s)
    except BaseException as error:
        out["ended with"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        predicted, refused = out.pop("predicted", []), out.pop("refused", [])
        report = {
            "process": process_state(),
            "random numbers": random_state(),
            "variables": program_state(program),
            "training": digest(out),
            "predicted": predicted,
            "refused": refused,
            "warned": [line for line in told if line.startswith("MemoryWarning")],
        }
        (home / "report.json").write_text(json.dumps(report))
    sys.exit()


def _wait(pid, limit_s):
    """Wait for a process for so long, then kill all that it has started."""
    handle = os.pidfd_open(pid)
    has_ended = bool(select.select([handle], [], [], limit_s)[0])
    os.close(handle)
    if not has_ended:
        for one in _descendants(pid):
            os.kill(one, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return has_ended, os.waitstatus_to_exitcode(status), used


def _descendants(pid):
    return [pid, *(one for child in children_of(pid) for one in _descendants(child))]


def _left_behind(own):
    """The processes that outlived the program; they are ours now, and end here."""
    until = time.monotonic() + _GRACE_S
    while (left := set(children_of(os.getpid())) - own) and time.monotonic() < until:
        if not any(os.waitpid(pid, os.WNOHANG)[0] for pid in left):
            time.sleep(0.01)
    commands = sorted(map(command_of, left))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return commands


def _files_in_shared_memory():
    """The names of the files in shared memory -> their inodes."""
    with os.scandir("/dev/shm") as files:
        return {file.name: str(file.inode()) for file in files}


def _left_in_shared_memory(known):
    """The files in shared memory that are new and that no process has mapped."""
    new = {name: inode for name, inode in _files_in_shared_memory().items() if name not in known}
    if not new:
        return []
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            # Address, permissions, offset, device, inode and path, which may be gone.
            mapped.update(re.findall(r"(\d+) +/dev/shm/", maps.read_text()))
    return sorted(name for name, inode in new.items() if inode not in mapped)


def import_late(loop, *, is_watched):
    """Import what a loop imports late, so that it is not done again in each fork."""
    for name in (*_LATE[""], *_LATE.get(loop, ()), *(_LATE_WATCHED if is_watched else ())):
        import_module(name)
    # What is there is then neither searched nor torn down in each fork.
    gc.collect()
    gc.freeze()


def main(folder):
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in sys.stdin:
        asked = json.loads(line)
        import_late(asked["loop"], is_watched=asked["is_watched"])
        said = run(Path(folder), **asked)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
