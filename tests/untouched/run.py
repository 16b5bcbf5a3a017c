"""Runs programs, each in a process of its own, and says what each left.

    python tests/untouched/run.py FOLDER [--watched]

It imports torch and Lightning once and forks for each program; itself it never trains. Each line
of its input is a program to run, {"program", "loop", "device", "limit_s"}, each line of its output
what it left. The program runs in FOLDER. With --watched memcallback watches the loop.
"""

from __future__ import annotations

import argparse
import ctypes
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
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "programs")]

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

#: What a loop imports late. The runner does, so that it is not done again for each program.
_LATE = {"": ["torch.utils.tensorboard"], "huggingface": ["transformers.trainer", "accelerate"]}
_LATE_WATCHED = ["memcallback.integrations.lightning.callback", "matplotlib.pyplot"]
_PR_SET_CHILD_SUBREAPER = 36
#: How long processes that a program has left may take to end by themselves.
_GRACE_S = 10


def run(home, program, loop, device, *, is_watched, limit_s):
    """Run a program in a fork; what it left, as a dictionary."""
    for name in (*_LATE[""], *_LATE.get(loop, ()), *(_LATE_WATCHED if is_watched else ())):
        import_module(name)
    shutil.rmtree(home, ignore_errors=True)
    (home / "work").mkdir(parents=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be(program, loop, device, is_watched, home)
    has_ended, status, peak_kib = _wait(pid, limit_s)
    left = _left_behind()
    report = home / "report.json"
    said = json.loads(report.read_text()) if report.exists() else {"report": "none"}
    text = (home / "stdout").read_text(errors="replace")
    said |= {
        "it ended": has_ended,
        "exit status": status,
        "left behind": left,
        "files": files_in(home / "work"),
        "printed": re.findall(r"user: ([^\r\n]*)", text),
        "peak_kib": peak_kib,
        "stderr": (home / "stderr").read_text(errors="replace")[-3000:],
    }
    shutil.rmtree(home)
    return said


def _be(name, loop, device, is_watched, home):
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
            LOOPS[loop](program, device, is_watched, out)
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
    return has_ended, os.waitstatus_to_exitcode(status), used.ru_maxrss


def _descendants(pid):
    return [pid, *(one for child in children_of(pid) for one in _descendants(child))]


def _left_behind():
    """The processes that outlived the program; they are ours now, and end here."""
    until = time.monotonic() + _GRACE_S
    while children_of(os.getpid()) and time.monotonic() < until:
        if os.waitpid(-1, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
    left = children_of(os.getpid())
    commands = sorted(map(command_of, left))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return commands


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--watched", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in sys.stdin:
        said = run(options.folder, **json.loads(line), is_watched=options.watched)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
